"""DeepSeek-V4 attention over whole rows, written for training: no cache, dense over compressed entries.

Window keys come in chunks of 128 (each query chunk sees its own and the chunk before), compressed entries are
appended to every chunk's keys, and one softmax with a sink runs over both. Row lengths are multiples of 128.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.geometry import Geometry

CHUNK = 128
# Finite, so that a query that sees no entry yet has a defined (uniform, unused) distribution.
HIDDEN = -1e30


def rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last axis; float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    """RMSNorm with a float32 weight; the result has the input's type."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] to the same."""
        return (self.weight * rms(x, self.eps)).to(x.dtype)


def rotation_tables(frequencies: list[float], positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Full-width tables for `rotate`: ones and zeros on the channels that are not rotated.

    positions  [S]
    returns    cos [S, width], signed sin [S, width]; float32
    """
    angle = positions.float()[:, None] * torch.tensor(frequencies, device=positions.device)
    cos = angle.cos().repeat_interleave(2, -1)
    sin = torch.stack((-angle.sin(), angle.sin()), -1).flatten(-2)
    plain = width - cos.shape[-1]
    return F.pad(cos, (plain, 0), value=1.0), F.pad(sin, (plain, 0), value=0.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved-pair rotation; float32. A negated sin rotates back.

    Written as two full-width products, which fuse with the norm before and need no slice of x.
    """
    swapped: Tensor = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)  # type: ignore[no-untyped-call]
    return x * cos + swapped * sin


class Compressor(nn.Module):
    """Pools each window of `ratio` tokens into one entry; ratio 4 also looks at the window before."""

    def __init__(self, geometry: Geometry, ratio: int, width: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.width = width
        self.overlap = ratio == 4
        channels = width * (2 if self.overlap else 1)
        self.wkv = nn.Linear(geometry.hidden_size, channels, bias=False)
        self.wgate = nn.Linear(geometry.hidden_size, channels, bias=False)
        self.ape = nn.Parameter(torch.zeros(ratio, channels))
        self.norm = Norm(width, geometry.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Entries [B, S / ratio, width] of x [B, S, H]; tables are those of the windows' first tokens."""
        batch, length, _ = x.shape
        windows = length // self.ratio
        both = F.linear(x, torch.cat((self.wkv.weight, self.wgate.weight)))
        both = both.view(batch, windows, self.ratio, 2, -1)
        kv, score = both[:, :, :, 0], both[:, :, :, 1].float() + self.ape
        if self.overlap:
            kv = self._with_previous(kv, 0.0)
            score = self._with_previous(score, float("-inf"))
        pooled = (torch.softmax(score, 2) * kv.float()).sum(2).to(x.dtype)
        return rotate(self.norm.weight * rms(pooled, self.norm.eps), cos, sin).to(x.dtype)

    def _with_previous(self, x: Tensor, empty: float) -> Tensor:
        """[B, W, 4, 2 d] to the eight items [B, W, 8, d]: A halves of the window before, own B halves."""
        before = F.pad(x[:, :-1, :, : self.width], (0, 0, 0, 0, 1, 0), value=empty)
        return torch.cat((before, x[..., self.width :]), 2)


class Indexer(nn.Module):
    """Scores every c4 entry for every query; learns from the attention it predicts, not from the text."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.heads = geometry.index_heads
        self.scale = geometry.index_head_dim**-0.5 * geometry.index_heads**-0.5
        self.wq_b = nn.Linear(geometry.q_lora_rank, self.heads * geometry.index_head_dim, bias=False)
        self.weights_proj = nn.Linear(geometry.hidden_size, self.heads, bias=False)
        self.compressor = Compressor(geometry, 4, geometry.index_head_dim)

    def forward(self, x: Tensor, qr: Tensor, tables: dict[str, Tensor]) -> Tensor:
        """Scores [B, S, S / 4] float32 from x [B, S, H] and qr [B, S, q_lora]; no gradient to either."""
        x, qr = x.detach(), qr.detach()
        batch, length, _ = x.shape
        q = self.wq_b(qr).view(batch, length, self.heads, -1).float()
        q = rotate(q, tables["index_cos"][:length, None], tables["index_sin"][:length, None]).to(x.dtype)
        k = self.compressor(x, tables["index_cos"][:length:4], tables["index_sin"][:length:4])
        weight = self.weights_proj(x).float() * self.scale
        dots = torch.bmm(q.view(batch, length * self.heads, -1), k.transpose(1, 2))
        scores: Tensor = (dots.view(batch, length, self.heads, -1).relu().float() * weight[..., None]).sum(2)
        return scores


def window_mask(chunks: int, device: torch.device) -> Tensor:
    """Which of [chunk before, own chunk] a query sees: itself and the 127 before; [C, 128, 256] bool."""
    query = torch.arange(CHUNK, device=device)[None, :, None]
    key = torch.arange(2 * CHUNK, device=device)[None, None, :]
    chunk = torch.arange(chunks, device=device)[:, None, None]
    return (key <= query + CHUNK) & (key > query) & ((chunk > 0) | (key >= CHUNK))


def causal_entries(length: int, ratio: int, device: torch.device) -> Tensor:
    """Entries whose window is complete at each query, [S, S / ratio] bool."""
    position = torch.arange(length, device=device)
    return torch.arange(length // ratio, device=device)[None, :] < ((position + 1) // ratio)[:, None]


def attend(
    q: Tensor, kv: Tensor, sink: Tensor, entries: Tensor | None, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention with one shared latent as key and value.

    q        [B, S, h, D]; kv [B, S, D]; sink [h]
    entries  [B, E, D], or None in a window-only layer
    visible  [B or 1, S, E] bool, which entries a query may use
    returns  output [B, S, h, D], weights of the entries summed over heads [B, S, E] (float32, detached)
    """
    batch, length, heads, width = q.shape
    chunks = length // CHUNK
    own = kv.view(batch, chunks, CHUNK, width)
    parts = [F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own]
    mask = window_mask(chunks, q.device)[None]
    if entries is not None and visible is not None:
        parts.append(entries[:, None].expand(-1, chunks, -1, -1))
        mask = torch.cat(
            (mask.expand(visible.shape[0], -1, -1, -1), visible.view(visible.shape[0], chunks, CHUNK, -1)), -1
        )
    keys = torch.cat(parts, 2).flatten(0, 1)
    logits = torch.bmm(q.reshape(batch * chunks, CHUNK * heads, width), keys.transpose(1, 2))
    logits = logits.view(batch, chunks, CHUNK, heads, -1).float() * width**-0.5
    logits = logits.masked_fill(~mask[:, :, :, None], HIDDEN)
    sinks = sink.view(heads, 1)
    top = torch.maximum(logits.amax(-1, keepdim=True), sinks).detach()
    raised = torch.exp(logits - top)
    weights = raised / (raised.sum(-1, keepdim=True) + torch.exp(sinks - top))
    flat = weights.to(q.dtype).view(batch * chunks, CHUNK * heads, -1)
    output = torch.bmm(flat, keys).view(batch, length, heads, width)
    mass = weights.detach()[..., 2 * CHUNK :].sum(3).view(batch, length, -1)
    return output, mass


def index_loss(scores: Tensor, mass: Tensor, visible: Tensor) -> Tensor:
    """KL from the attention's distribution over visible entries to the indexer's, up to a constant."""
    logs = torch.log_softmax(scores.masked_fill(~visible, HIDDEN), -1)
    target = mass / (mass.sum(-1, keepdim=True) + 1e-9)
    return -(target * logs.masked_fill(~visible, 0.0)).sum(-1).mean()


def best_entries(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """The topk visible entries of each query by score (all while there are fewer), [B, S, E] bool."""
    masked = scores.detach().masked_fill(~visible, HIDDEN)
    if masked.shape[-1] <= topk:
        return visible.expand_as(masked)
    worst_kept = torch.topk(masked, topk, -1).values[..., -1:]
    return visible & (masked >= worst_kept)


class Attention(nn.Module):
    """One attention sub-block; parameter names are those of DeepSeek's checkpoints."""

    def __init__(self, geometry: Geometry, ratio: int) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.ratio = ratio
        group_width = g.num_heads * g.head_dim // g.o_groups
        self.wq_a = nn.Linear(g.hidden_size, g.q_lora_rank, bias=False)
        self.q_norm = Norm(g.q_lora_rank, g.rms_norm_eps)
        self.wq_b = nn.Linear(g.q_lora_rank, g.num_heads * g.head_dim, bias=False)
        self.wkv = nn.Linear(g.hidden_size, g.head_dim, bias=False)
        self.kv_norm = Norm(g.head_dim, g.rms_norm_eps)
        self.wo_a = nn.Linear(group_width, g.o_groups * g.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(g.o_groups * g.o_lora_rank, g.hidden_size, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(g.num_heads))
        if ratio:
            self.compressor = Compressor(g, ratio, g.head_dim)
        if ratio == 4:
            self.indexer = Indexer(g)

    def forward(
        self, x: Tensor, tables: dict[str, Tensor], indexed: bool, selecting: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output [B, S, H] and the indexer's loss (0 where it is idle).

        x          [B, S, H] after attn_norm
        indexed    the indexer runs and learns; c4 layers only
        selecting  bool scalar: an indexed layer sees the top-k entries alone; a tensor, so that both ways
                   share one compiled graph
        """
        batch, length, _ = x.shape
        g = self.geometry
        kind = "compress" if self.ratio else "plain"
        cos, sin = tables[f"{kind}_cos"][:length], tables[f"{kind}_sin"][:length]
        qr = self.q_norm(self.wq_a(x))
        q = self.wq_b(qr).view(batch, length, g.num_heads, g.head_dim)
        q = rotate(rms(q, g.rms_norm_eps), cos[:, None], sin[:, None]).to(x.dtype)
        kv = rotate(self.kv_norm.weight * rms(self.wkv(x), g.rms_norm_eps), cos, sin).to(x.dtype)
        loss = x.new_zeros((), dtype=torch.float32)
        if not self.ratio:
            output, _ = attend(q, kv, self.attn_sink, None, None)
            return self._project(output, cos, sin), loss
        entries = self.compressor(x, cos[:: self.ratio], sin[:: self.ratio])
        causal = causal_entries(length, self.ratio, x.device)[None]
        if not indexed:
            output, _ = attend(q, kv, self.attn_sink, entries, causal)
            return self._project(output, cos, sin), loss
        scores = self.indexer(x, qr, tables)
        visible = causal & (best_entries(scores, causal, g.index_topk) | ~selecting)
        output, mass = attend(q, kv, self.attn_sink, entries, visible)
        return self._project(output, cos, sin), index_loss(scores, mass, visible)

    def _project(self, output: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates the values back by the query's position, then the grouped low-rank projection."""
        g = self.geometry
        batch, length = output.shape[:2]
        rotated = rotate(output.float(), cos[:, None], -sin[:, None]).to(output.dtype)
        grouped = rotated.view(batch * length, g.o_groups, -1).transpose(0, 1)
        low = torch.bmm(grouped, self.wo_a.weight.view(g.o_groups, g.o_lora_rank, -1).transpose(1, 2))
        projected: Tensor = self.wo_b(low.transpose(0, 1).reshape(batch, length, -1))
        return projected
