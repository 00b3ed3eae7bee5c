"""The DSpark draft for training: many blocks of whole rows at once, over tapped layers of a frozen target.

A block at anchor `a` is the anchor token and noise; its rows stand at a, a + 1, ... and see each other, in
both directions, and the context rows a - 128 .. a - 1: projections of the target's layer outputs. Blocks
come in groups by the chunk of 128 positions that their anchor lies in, so that the keys of a group are two
neighbouring chunks.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.attention import CHUNK, HIDDEN, Norm, rms, rotate, rotation_tables
from training.geometry import Geometry
from training.model import MAX_LENGTH, Model, SubBlocks, head_collapse, spread


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What the draft adds to the target's geometry; the defaults are the shipped draft's."""

    block: int = 5
    taps: tuple[int, ...] = (5, 6, 7)
    stages: int = 3
    rank: int = 128
    noise_id: int = 8178

    def fields(self) -> dict[str, object]:
        """The entries of config.json."""
        return {
            "dspark_block_size": self.block,
            "dspark_markov_rank": self.rank,
            "dspark_noise_token_id": self.noise_id,
            "dspark_target_layer_ids": list(self.taps),
        }


@dataclass(frozen=True, slots=True)
class Blocks:
    """Places of the blocks of rows [B, S] of C chunks.

    anchors  [B, C, A] int64, positions in the row, all inside their chunk
    starts   [B, C, A] int64, where each anchor's text begins: no context from before is seen
    """

    anchors: Tensor
    starts: Tensor

    def visible(self) -> Tensor:
        """Which of [chunk before, own chunk] each block sees, [B * C, A, 256] bool."""
        chunks = self.anchors.shape[1]
        first = (torch.arange(chunks, device=self.anchors.device) - 1)[None, :, None, None] * CHUNK
        key = first + torch.arange(2 * CHUNK, device=self.anchors.device)
        anchor = self.anchors[..., None]
        seen = (key < anchor) & (key >= anchor - CHUNK) & (key >= self.starts[..., None])
        return seen.flatten(0, 1)

    def positions(self, block: int) -> Tensor:
        """Position of each block row, [B, C, A, block]."""
        return self.anchors[..., None] + torch.arange(block, device=self.anchors.device)


class Stage(SubBlocks):
    """One V4 layer over block rows, whose attention also sees the projected context."""

    def __init__(self, geometry: Geometry, index: int) -> None:
        super().__init__(geometry, index, 0, False)

    def latents(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys, which are also the values, of x [..., H]; tables fit the leading axes."""
        kv = self.attn.wkv(x)
        return rotate(self.attn.kv_norm.weight * rms(kv, self.attn.kv_norm.eps), cos, sin).to(x.dtype)

    def attention_half(
        self,
        streams: Tensor,
        main: Tensor,
        visible: Tensor,
        row: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Streams [T, hc, H] after attention.

        main     [B, S, H], projected context; visible [B * C, A, 256]
        row      rotation tables of the context [S, D]; own: those of the block rows [T, D]
        """
        g = self.attn.geometry
        u, post, comb = self.hc_attn.collapse(streams)
        x = self.attn_norm(u)
        q = self.attn.wq_b(self.attn.q_norm(self.attn.wq_a(x))).view(-1, g.num_heads, g.head_dim)
        q = rotate(rms(q, g.rms_norm_eps), own[0][:, None], own[1][:, None]).to(x.dtype)
        latents = self.latents(x, *own)
        context = self.latents(main, *row).view(main.shape[0], -1, CHUNK, g.head_dim)
        keys = torch.cat((F.pad(context[:, :-1], (0, 0, 0, 0, 1, 0)), context), 2).flatten(0, 1)
        out = attend_block(q, latents, keys, visible, self.attn.attn_sink)
        mixed = self.attn._project(out[None], *own)[0]
        return spread(mixed, streams, post, comb)


def attend_block(q: Tensor, own: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> Tensor:
    """Attention of blocks over their context and themselves, one softmax with a sink.

    q        [T, h, D]; own [T, D], T = groups * A * block
    keys     [groups, 256, D]; visible [groups, A, 256] bool
    returns  [T, h, D]
    """
    groups, anchors, _ = visible.shape
    heads, width = q.shape[1:]
    rows = q.shape[0] // (groups * anchors)
    grouped = q.view(groups, anchors * rows * heads, width)
    alone = own.view(groups * anchors, rows, width)
    far = torch.bmm(grouped, keys.transpose(1, 2)).view(groups, anchors, rows, heads, -1)
    near = torch.bmm(q.view(groups * anchors, rows * heads, width), alone.transpose(1, 2))
    logits = torch.cat((far, near.view(groups, anchors, rows, heads, rows)), -1).float() * width**-0.5
    mask = F.pad(visible, (0, rows), value=True)[:, :, None, None]
    logits = logits.masked_fill(~mask, HIDDEN)
    sinks = sink.view(heads, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sinks).detach()
    raised = torch.exp(logits - top)
    weights = (raised / (raised.sum(-1, keepdim=True) + torch.exp(sinks - top))).to(q.dtype)
    span = keys.shape[1]
    from_far = torch.bmm(weights[..., :span].reshape(groups, -1, span), keys)
    from_near = torch.bmm(weights[..., span:].reshape(groups * anchors, -1, rows), alone)
    return (from_far.view(q.shape) + from_near.view(q.shape)).view(q.shape)


class Collapse(nn.Module):
    """From the last stage's streams to one vector."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.fn = nn.Parameter(torch.empty(g.hc_mult, g.hc_mult * g.hidden_size))
        self.base = nn.Parameter(torch.zeros(g.hc_mult))
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, streams: Tensor) -> Tensor:
        """[T, H] of streams [T, hc, H]."""
        return head_collapse(streams, self.fn, self.base, self.scale, self.geometry)


class Draft(nn.Module):
    """Stages, context projection and heads. Embedding and vocabulary scores are the target's."""

    def __init__(self, geometry: Geometry, shape: DraftShape) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.shape = shape
        self.main_proj = nn.Linear(len(shape.taps) * g.hidden_size, g.hidden_size, bias=False)
        self.main_norm = Norm(g.hidden_size, g.rms_norm_eps)
        self.stages = nn.ModuleList(Stage(g, i) for i in range(shape.stages))
        self.mix = Collapse(g)
        self.norm = Norm(g.hidden_size, g.rms_norm_eps)
        self.markov_embed = nn.Embedding(g.vocab_size, shape.rank)
        self.markov_head = nn.Linear(shape.rank, g.vocab_size, bias=False)
        self.confidence_head = nn.Linear(g.hidden_size + shape.rank, 1, bias=False)
        tables = rotation_tables(g.frequencies(False), torch.arange(MAX_LENGTH + shape.block), g.head_dim)
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)

    def blocks(self) -> list[Stage]:
        """The stages, typed."""
        return [cast(Stage, stage) for stage in self.stages]

    def context(self, taps: Tensor) -> Tensor:
        """What every stage makes its context keys of, [B, S, H], from taps [B, S, K * H]."""
        main: Tensor = self.main_norm(self.main_proj(taps))
        return main

    def forward(
        self, ids: Tensor, embedding: Tensor, taps: Tensor, blocks: Blocks
    ) -> tuple[Tensor, list[Tensor]]:
        """Collapsed hidden rows before the norm [B * C * A * block, H], and the loads of each stage.

        ids        [B, S]; embedding [V, H], the target's; taps [B, S, K * H]
        """
        shape, hc = self.shape, self.geometry.hc_mult
        positions = blocks.positions(shape.block).flatten()
        rows = torch.full((*blocks.anchors.shape, shape.block), shape.noise_id, device=ids.device)
        rows[..., 0] = ids.gather(1, blocks.anchors.flatten(1)).view(blocks.anchors.shape)
        flat = rows.flatten()
        streams = embedding[flat][:, None].expand(-1, hc, -1).contiguous()
        main, visible = self.context(taps), blocks.visible()
        cos, sin = cast(Tensor, self.cos), cast(Tensor, self.sin)
        row = (cos[: ids.shape[1]], sin[: ids.shape[1]])
        own = (cos[positions], sin[positions])
        loads = []
        for stage in self.blocks():
            streams = stage.attention_half(streams, main, visible, row, own)
            streams, load = stage.expert_half(streams, flat)
            loads.append(load)
        return self.mix(streams), loads

    def logits(self, hidden: Tensor, previous: Tensor, head: Tensor) -> Tensor:
        """Scores [T, V] after the tokens `previous` [T]; head [V, H] is the target's."""
        both = torch.cat((self.norm(hidden), self.markov_embed(previous)), -1)
        return F.linear(both, torch.cat((head, self.markov_head.weight), 1))

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of each row's survival [T], float32."""
        both = torch.cat((hidden, self.markov_embed(previous)), -1)
        logit: Tensor = self.confidence_head(both).float()[:, 0]
        return logit


def initialise_draft(draft: Draft, target: Model, seed: int) -> None:
    """Fills every matrix as the target's were; the Markov and confidence heads begin as no influence."""
    generator = torch.Generator().manual_seed(seed)
    depth = (2 * draft.shape.stages) ** -0.5
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if parameter.ndim < 2:
                continue
            std = parameter.shape[-1] ** -0.5
            if name.startswith(("markov_head", "confidence_head")):
                std = 0.0
            elif name.endswith(("wo_b.weight", "w2")):
                std *= depth
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        draft.norm.weight.copy_(target.head.norm.weight)


@torch.no_grad()
def observe(target: Model, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Taps [B, S, K * H] and what the target scores, [B, S, H], of ids [B, S]; nothing is stored."""
    x = target.embed(ids).flatten(0, 1)
    streams = x[:, None].expand(-1, target.geometry.hc_mult, -1).contiguous()
    tables = target.tables()
    selecting = torch.tensor(True, device=ids.device)
    kept = {}
    for index, layer in enumerate(target.blocks()):
        streams, _, _ = layer(streams, ids, tables, layer.attn.ratio == 4, selecting)
        if index in taps:
            kept[index] = streams.float().mean(1).to(streams.dtype)
    tapped = torch.cat([kept[index] for index in taps], -1)
    return tapped.view(*ids.shape, -1), target.head.hidden(streams).view(*ids.shape, -1)
