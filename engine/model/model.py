"""DeepSeek-V4 as a function of one planned step; layers run in stages, so that halves can interleave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.attention import LayerStep, attention
from engine.model.coded_rows import Rows, values_of
from engine.model.config import C4, C128, ModelConfig
from engine.model.groups import ALONE, Group, Groups
from engine.model.invariant import TileOps
from engine.model.ops import TorchOps
from engine.model.parallel import ExpertRows, Experts, Head, LocalExperts, LocalHead, SplitHead, SpreadExperts
from engine.model.quantised import Stored
from engine.model.rope import compressed_frequencies, plain_frequencies
from engine.model.rounding import KVRounding, Rounding
from engine.model.share import share_of
from engine.model.step import LayerCache, Pending, StepRows, Turns, of_blocks
from engine.model.taker import Taker
from engine.model.weights import LayerWeights, MhcWeights, head_weights, layer_weights


@dataclass(frozen=True)
class Entered:
    """A sub-block at its beginning.

    streams  [T, hc, H] before it
    x        its normalised input [T, H]
    post     [T, hc] and comb [T, hc, hc] float32: how its result enters the streams
    """

    streams: Tensor
    x: Rows
    post: Tensor
    comb: Tensor


@dataclass(frozen=True)
class Dispatched:
    """Rows on their way to the experts; `shared` [T, H] is what the shared expert gives meanwhile."""

    entered: Entered
    sent: ExpertRows
    shared: Tensor


class Layer:
    """One backbone layer, in four stages: attention, dispatch, experts, combine.

    A sub-block's result enters the streams together with the next sub-block's beginning, of whatever layer
    that is: `enter` begins the first one, `follow` each later one, `leave` ends the last.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, ops: TorchOps, routed: Experts) -> None:
        self.config, self.weights, self.ops, self.routed = config, weights, ops, routed

    def enter(self, streams: Tensor) -> Entered:
        """The attention sub-block on streams [T, hc, H]."""
        return Entered(streams, *self.ops.mhc_pre(streams, self.weights.attn_mhc, *self._sinkhorn()))

    def follow(self, entered: Entered, y: Tensor) -> Entered:
        """The attention sub-block after another layer's expert sub-block, which gave y [T, H]."""
        return self._follow(entered, y, self.weights.attn_mhc)

    def leave(self, entered: Entered, y: Tensor) -> Tensor:
        """Streams [T, hc, H] after a sub-block that gave y [T, H]."""
        return self.ops.mhc_post(y, entered.streams, entered.post, entered.comb)

    def attention(self, entered: Entered, step: LayerStep) -> Entered:
        """The expert sub-block after the attention sub-block."""
        y = attention(entered.x, self.weights.attention, step)
        return self._follow(entered, y, self.weights.ffn_mhc)

    def dispatch(self, entered: Entered, token_ids: Tensor, rows: StepRows) -> Dispatched:
        """Chooses experts and sends the rows there; token_ids [T] int64."""
        x = values_of(entered.x)
        count, scaling = self.config.num_experts_per_tok, self.config.routed_scaling_factor
        moe = self.weights.moe
        ids, weights = self.ops.route_padded(x, token_ids, rows.padding, moe, count, scaling)
        sent = self.routed.send(self.ops, x, ids, weights, rows.agreed, moe)
        return Dispatched(entered, sent, self.ops.shared_expert(entered.x, moe, self.config.swiglu_limit))

    def experts(self, rows: Dispatched) -> Tensor:
        """What this rank's routed experts give to the rows that they got."""
        return self.routed.run(self.ops, rows.sent, self.weights.moe, self.config.swiglu_limit)

    def combine(self, rows: Dispatched, given: Tensor) -> Tensor:
        """What the expert sub-block gives, [T, H]; `given` is `experts`' result."""
        return self.routed.back(self.ops, rows.sent, given, rows.shared)

    def _follow(self, entered: Entered, y: Tensor, mhc: MhcWeights) -> Entered:
        way = entered.streams, entered.post, entered.comb
        return Entered(*self.ops.mhc_next(y, *way, mhc, *self._sinkhorn()))

    def _sinkhorn(self) -> tuple[int, float, float]:
        config = self.config
        return config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps


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
        routed = self._routed(groups.ep, share.experts.start)
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

    def _routed(self, group: Group, first: int) -> Experts:
        """The way to experts that are spread over a group, of which this rank's begin at `first`."""
        if group.size == 1:
            return LocalExperts()
        return self.ops.near_experts(group, first, self.config) or SpreadExperts(group, first)

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
        ops, table = self.ops, self._compressed
        plain, plain_back = ops.turns_and_back(rows.positions, self._plain)
        compressed, compressed_back = ops.turns_and_back(rows.positions, table)
        return Turns(
            plain,
            of_blocks(plain_back, rows.blocks),
            compressed,
            of_blocks(compressed_back, rows.blocks),
            None if rows.c4 is None else ops.turns(rows.c4.positions, table),
            tuple(ops.turns(entries.positions, table) for entries in rows.c128),
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
        entered, last = self.layers[0].enter(streams), self.layers[-1]
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            ratio = layer.weights.ratio
            own = next(raw[ratio]) if ratio else None
            step = LayerStep(
                self.config, self.ops, self.rounding, self.single_rows, ratio, rows, step_turns, cache, own
            )
            entered = layer.attention(entered, step)
            dispatched = layer.dispatch(entered, token_ids, rows)
            y = layer.combine(dispatched, layer.experts(dispatched))
            if layer is last:
                streams = layer.leave(entered, y)
            else:
                entered = self.layers[number + 1].follow(entered, y)
                streams = entered.streams
            if number in taps:
                torch.mean(streams, dim=1, out=pending.taps[taps.index(number)])
        for place, tap in enumerate(taps):
            if tap >= len(self.layers):
                pending.taps[place].copy_(streams[:, tap - len(self.layers)])
        return streams

    def logits(self, streams: Tensor, agreed: int) -> Tensor:
        """streams [R, hc, H] to logits [R, V] float32; `agreed` is what every rank brings, at least R."""
        return self._projection.logits(self.ops, streams, self.head, self.config, agreed)
