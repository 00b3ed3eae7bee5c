"""DeepSeek-V4 as a function of one planned step; layers run in stages, so that halves can interleave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.attention import LayerStep, attention
from engine.model.config import C4, C128, ModelConfig
from engine.model.groups import ALONE, Groups
from engine.model.invariant import TileOps
from engine.model.ops import TorchOps
from engine.model.parallel import ExpertRows, Experts, Head, LocalExperts, LocalHead, SplitHead, SpreadExperts
from engine.model.quantised import Stored
from engine.model.rope import compressed_frequencies, plain_frequencies, turns
from engine.model.rounding import KVRounding, Rounding
from engine.model.share import share_of
from engine.model.step import LayerCache, Pending, StepRows, Turns
from engine.model.taker import Taker
from engine.model.weights import LayerWeights, head_weights, layer_weights


@dataclass(frozen=True)
class Dispatched:
    """Rows on their way to the experts: own normalised x [T, H], what the experts here got, the way back."""

    x: Tensor
    sent: ExpertRows
    streams: Tensor
    post: Tensor
    comb: Tensor


class Layer:
    """One backbone layer, in four stages: attention, dispatch, experts, combine."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, ops: TorchOps, routed: Experts) -> None:
        self.config, self.weights, self.ops, self.routed = config, weights, ops, routed

    def attention(self, streams: Tensor, step: LayerStep) -> Tensor:
        """Streams [T, hc, H] after the attention sub-block."""
        x, post, comb = self._enter(streams, ffn=False)
        return self.ops.mhc_post(attention(x, self.weights.attention, step), streams, post, comb)

    def dispatch(self, streams: Tensor, token_ids: Tensor, rows: StepRows) -> Dispatched:
        """Enters the expert sub-block, chooses experts, sends the rows there; token_ids [T] int64."""
        x, post, comb = self._enter(streams, ffn=True)
        count, scaling = self.config.num_experts_per_tok, self.config.routed_scaling_factor
        ids, weights = self.ops.route(x, token_ids, self.weights.moe, count, scaling)
        if rows.padding is not None:
            outside = rows.padding.unsqueeze(1)
            ids, weights = ids.masked_fill(outside, -1), weights.masked_fill(outside, 0)
        return Dispatched(x, self.routed.send(self.ops, x, ids, weights, rows.agreed), streams, post, comb)

    def experts(self, rows: Dispatched) -> Tensor:
        """What this rank's routed experts give to the rows that they got."""
        return self.routed.run(self.ops, rows.sent, self.weights.moe, self.config.swiglu_limit)

    def combine(self, rows: Dispatched, given: Tensor) -> Tensor:
        """Streams [T, hc, H] after the expert sub-block; `given` is `experts`' result."""
        shared = self.ops.shared_expert(rows.x, self.weights.moe, self.config.swiglu_limit)
        y = self.routed.back(self.ops, given, shared)
        return self.ops.mhc_post(y, rows.streams, rows.post, rows.comb)

    def _enter(self, streams: Tensor, *, ffn: bool) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        mhc = self.weights.ffn_mhc if ffn else self.weights.attn_mhc
        return self.ops.mhc_pre(streams, mhc, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)


class DeepseekV4:
    """The backbone.

    weights        what the loader gives under DeepSeek's names, experts one by one
    deterministic  a row's bits don't depend on its neighbours: each query gathers its own keys, in order
    kv_rounding    rounds what is cached in the model's type, as `Rounding` says; FP8 pools always round
    ops            the kernel set; None: plain torch
    groups         the ranks that this one acts with; experts are spread over `ep`
    split_head     the head's rows are split over `dp`
    raises         CheckpointError for a missing or misshapen tensor, ConfigError
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Stored],
        *,
        device: str | torch.device,
        dtype: torch.dtype,
        deterministic: bool,
        kv_rounding: KVRounding,
        ops: TorchOps | None = None,
        groups: Groups = ALONE,
        split_head: bool = False,
    ) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        self.ops = ops or (TileOps() if deterministic else TorchOps())
        if deterministic and not self.ops.row_invariant:
            raise ConfigError(
                f"deterministic mode needs row-invariant operations, not {type(self.ops).__name__}"
            )
        self.single_rows, self.row_tile = deterministic, self.ops.row_tile
        self.rounding = Rounding(config, kv_rounding, dtype)
        taker = Taker(weights, self.device, dtype, keeps=self.ops.keeps)
        share = share_of(config, groups, split_head=split_head)
        spread, self.splits_head = groups.ep.size > 1, split_head and groups.dp.size > 1
        routed: Experts = SpreadExperts(groups.ep, share.experts.start) if spread else LocalExperts()
        self._projection: Head = SplitHead(groups.dp) if self.splits_head else LocalHead()
        self.groups, self.needs_every_rank = groups, spread or self.splits_head
        self.embed = taker.take("embed.weight", (config.vocab_size, config.hidden_size))
        self.head = head_weights(config, taker, share)
        self.layers = [
            Layer(config, layer_weights(config, taker, layer, share), self.ops, routed)
            for layer in range(config.num_hidden_layers)
        ]
        self._plain = plain_frequencies(config).to(self.device)
        self._compressed = compressed_frequencies(config).to(self.device)

    def new_pending(self, rows: int, taps: int) -> Pending:
        """Empty workspaces for a step of `rows` padded rows with `taps` captured layers."""
        config = self.config
        c4_width = 4 * (config.head_dim + config.index_head_dim)
        shapes = (
            (len(config.layers_of(C4)), rows, c4_width),
            (len(config.layers_of(C128)), rows, 2 * config.head_dim),
        )
        c4, c128 = (torch.empty(shape, dtype=torch.float32, device=self.device) for shape in shapes)
        return Pending(
            c4, c128, torch.empty(taps, rows, config.hidden_size, dtype=self.dtype, device=self.device)
        )

    def turns(self, rows: StepRows) -> Turns:
        """Rotations of a step's rows and closing entries."""
        plain, compressed = turns(rows.positions, self._plain), turns(rows.positions, self._compressed)
        return Turns(
            plain,
            plain.conj().resolve_conj(),
            compressed,
            compressed.conj().resolve_conj(),
            None if rows.c4 is None else turns(rows.c4.positions, self._compressed),
            tuple(turns(entries.positions, self._compressed) for entries in rows.c128),
        )

    def streams(self, token_ids: Tensor) -> Tensor:
        """Input streams [T, hc, H] of token_ids [T]: hc equal copies of each embedding."""
        embedded = self.embed.index_select(0, token_ids)
        return embedded.unsqueeze(1).expand(-1, self.config.hc_mult, -1).contiguous()

    def backbone(
        self,
        token_ids: Tensor,
        rows: StepRows,
        caches: list[LayerCache],
        pending: Pending,
        taps: tuple[int, ...],
    ) -> Tensor:
        """Streams [T, hc, H] after the last layer; fills `pending` and the step's own pool rows.

        taps  layers whose mean over the streams is captured; number of layers + s: the last one's stream s
        """
        streams, step_turns = self.streams(token_ids), self.turns(rows)
        raw = {C4: iter(pending.c4), C128: iter(pending.c128)}
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ratio = layer.weights.ratio
            own = next(raw[ratio]) if ratio else None
            step = LayerStep(
                self.config, self.ops, self.rounding, self.single_rows, ratio, rows, step_turns, cache, own
            )
            streams = layer.attention(streams, step)
            dispatched = layer.dispatch(streams, token_ids, rows)
            streams = layer.combine(dispatched, layer.experts(dispatched))
            if number in taps:
                torch.mean(streams, dim=1, out=pending.taps[taps.index(number)])
        for place, tap in enumerate(taps):
            if tap >= len(self.layers):
                pending.taps[place].copy_(streams[:, tap - len(self.layers)])
        return streams

    def logits(self, streams: Tensor, rows: StepRows) -> Tensor:
        """streams [R, hc, H] to logits [R, V] float32."""
        return self._projection.logits(self.ops, streams, self.head, self.config, rows.agreed_logits)
