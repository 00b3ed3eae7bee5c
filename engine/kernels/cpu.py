"""The model's operations on the CPU in float32, by C kernels of `engine/native`. The oracle is `TorchOps`.

Weights are packed at first use, as bfloat16 where that loses nothing (FP8, FP4 and bfloat16 checkpoints):
half the bytes of a decode step. Every operation is row-invariant by construction: a row's additions run in an
order that doesn't depend on the other rows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.model.coded_rows import Rows, values_of
from engine.model.expert_weights import MoeWeights
from engine.model.invariant import in_order
from engine.model.keys import AnyKeys, Keys, dense
from engine.model.ops import TorchOps
from engine.model.quantised import Weight, plain
from engine.model.weights import HeadWeights, MhcWeights
from engine.native import level, load

PANEL, LANES = 32, 16


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] in the kernels' layout; `groups` of them behind each other."""

    panels: Tensor
    n: int
    k: int
    bf16: int

    def of(self, group: int) -> tuple[int, int, int, int]:
        """The kernel's four arguments for one group."""
        size = -(-self.n // PANEL) * PANEL * self.k * self.panels.element_size()
        return self.panels.data_ptr() + group * size, self.n, self.k, self.bf16


class CpuOps(TorchOps):
    """Kernels of this processor's level. Tensors are float32, contiguous, on the CPU."""

    name = "native"
    row_invariant = True

    def __init__(self) -> None:
        self.level = level()
        self.kernels = load(self.level)
        self._packed: dict[int, tuple[weakref.ref[Tensor], Packed]] = {}

    def packed(self, weight: Weight) -> Packed:
        """`weight` [n, k] or [groups, n, k] packed; made once for each weight tensor."""
        weight = plain(weight)
        known = self._packed.get(id(weight))
        if known is not None and known[0]() is weight:
            return known[1]
        made = self._pack(weight)
        self._packed[id(weight)] = (weakref.ref(weight), made)
        return made

    def _pack(self, weight: Tensor) -> Packed:
        n, k = weight.shape[-2:]
        groups = weight.float().reshape(-1, n, k)
        bf16 = bool((groups.bfloat16().float() == groups).all())
        dtype = torch.bfloat16 if bf16 else torch.float32
        panels = torch.empty(len(groups), -(-n // PANEL) * PANEL * k, dtype=dtype)
        for group, into in zip(groups.contiguous(), panels, strict=True):
            self.kernels.pack(into.data_ptr(), group.data_ptr(), n, k, int(bf16))
        return Packed(panels, n, k, int(bf16))

    def _gemm(self, out: Tensor, x: Tensor, packed: Packed) -> Tensor:
        if x.dtype != torch.float32 or x.shape[-1] != packed.k or not x.is_contiguous():
            raise ShapeMismatch(f"x is {tuple(x.shape)} {x.dtype}, the weight takes float32 [T, {packed.k}]")
        rows = x.numel() // packed.k
        self.kernels.gemm(out.data_ptr(), out.stride(0), x.data_ptr(), packed.k, *packed.of(0), rows)
        return out

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        x, packed = values_of(x).contiguous(), self.packed(weight)
        return self._gemm(torch.empty(x.shape[0], packed.n), x, packed)

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        torch.add(self.linear(x, weight), biases.index_select(0, at), out=out)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        weight = plain(weight)
        groups, rank, width = weight.shape
        packed, rows = self.packed(weight), x.numel() // (groups * width)
        x = x.contiguous()
        out = torch.empty(rows, groups * rank)
        for group in range(groups):
            self.kernels.gemm(
                out.data_ptr() + group * rank * 4,
                groups * rank,
                x.data_ptr() + group * width * 4,
                groups * width,
                *packed.of(group),
                rows,
            )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        n = x.shape[-1]
        if n % LANES:
            raise ShapeMismatch(f"rows of {n} values; the kernel takes a multiple of {LANES}")
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.contiguous()
        stride = x.stride(0) if x.dim() == 2 else n
        out = torch.empty(x.shape)
        pointer = 0 if weight is None else weight.data_ptr()
        self.kernels.rms_norm(out.data_ptr(), x.data_ptr(), stride, pointer, x.numel() // n, n, eps)
        return out

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        if not x.is_contiguous() or not turns.is_contiguous():
            super().rotate(x, turns)
            return
        n, pairs = x.shape[-1], turns.shape[-1]
        rows, lines = x.numel() // n, turns.numel() // pairs
        if lines:
            self.kernels.rotate(x.data_ptr(), turns.data_ptr(), rows, rows // lines, n, n, pairs)

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, hc, hidden = streams.shape
        if hc != 4 or hidden % LANES:
            raise ShapeMismatch(f"{hc} streams of {hidden}; the kernel takes 4 of a multiple of {LANES}")
        mixed = self.linear(streams.view(rows, hc * hidden), mhc.fn)
        out, post, comb = torch.empty(rows, hidden), torch.empty(rows, hc), torch.empty(rows, hc, hc)
        addresses = [t.data_ptr() for t in (out, post, comb, streams, mixed, mhc.scale, mhc.base, mhc.norm)]
        self.kernels.mhc_pre(*addresses, rows, hidden, iterations, hc_eps, eps)
        return out, post, comb

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        rows, _, hidden = streams.shape
        y, out = y.contiguous(), torch.empty_like(streams)
        self.kernels.mhc_post(*(t.data_ptr() for t in (out, y, streams, post, comb)), rows, hidden)
        return out

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        rows, hc, hidden = streams.shape
        flat = streams.reshape(rows, hc * hidden)
        mix = self.linear(flat, head.fn) * self.inverse_rms(flat, eps)
        # torch rounds the last few values of a tensor otherwise than full vectors: none of ours may be last.
        gates = torch.sigmoid(F.pad(mix * head.scale + head.base, (0, 0, 0, PANEL)))[:rows]
        weights = gates + hc_eps
        return (weights.unsqueeze(2) * flat.view(rows, hc, hidden)).sum(1)

    def _keys(self, keys: Keys | None) -> tuple[int, int, int, int]:
        if keys is None:
            return 0, 0, 0, 0
        if keys.pool.dtype != torch.float32:
            raise ShapeMismatch(f"a pool of {keys.pool.dtype}; the kernels read float32")
        return keys.pool.data_ptr(), keys.rows.data_ptr(), keys.bias.data_ptr(), keys.rows.shape[-1]

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        blocks, width, heads, wide = q.shape
        window = dense(window, blocks, width)
        compressed = None if compressed is None else dense(compressed, blocks, width)
        if wide % PANEL:
            raise ShapeMismatch(f"heads of {wide} channels; the kernel takes a multiple of {PANEL}")
        out, scale = torch.zeros_like(q), wide**-0.5
        if compressed is not None and compressed.rows.shape[0] != blocks:
            # Keys of single queries: the window's, which a block shares, are looked at query by query too.
            rows = window.rows.repeat_interleave(width, 0)
            window = Keys(window.pool, rows, window.bias.reshape(blocks * width, 1, -1))
            blocks, width = blocks * width, 1
        sources = (*self._keys(window), *self._keys(compressed))
        self.kernels.attend(
            out.data_ptr(), q.data_ptr(), 0, blocks, width, *sources, sink.data_ptr(), scale, heads, wide
        )
        return out

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        blocks, width, heads, wide = q.shape
        keys = dense(keys, blocks, width)
        q, head_weights = q.contiguous(), head_weights.contiguous()
        out = torch.empty(blocks, width, keys.rows.shape[1])
        addresses = [t.data_ptr() for t in (out, q, head_weights)]
        self.kernels.index_scores(*addresses, *self._keys(keys), blocks, width, heads, wide)
        return out

    def pool_windows(self, latents: Tensor, scores: Tensor) -> Tensor:
        windows, items, width = latents.shape
        latents, scores = latents.contiguous(), scores.contiguous()
        out = torch.empty(windows, width)
        addresses = [t.data_ptr() for t in (out, latents, scores)]
        self.kernels.pool_windows(*addresses, windows, items, width, width)
        return out

    def fold(self, state: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
        windows, items, width = rows.shape
        out, rows, valid = state.clone(), rows.contiguous(), valid.contiguous()
        addresses = [t.data_ptr() for t in (out, rows, valid)]
        self.kernels.fold(*addresses, windows, items, width // 2)
        return out

    def route(
        self, x: Tensor, token_ids: Tensor, moe: MoeWeights, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        logits = self.linear(x, moe.gate)
        rows, experts = logits.shape
        chosen = None if moe.table is None else moe.table.index_select(0, token_ids)
        ids, weights = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
        bias = 0 if moe.bias is None else moe.bias.data_ptr()
        table = 0 if chosen is None else chosen.data_ptr()
        addresses = [t.data_ptr() for t in (ids, weights, logits)]
        self.kernels.route(*addresses, bias, table, rows, experts, count, scaling)
        return ids, weights

    def select(self, scores: Tensor, count: int) -> Tensor:
        chosen = scores.topk(count, dim=-1, sorted=False).indices
        unseen = scores.gather(-1, chosen).isneginf()
        # In the order of the entries, so that a row's sums are those of a row without selection; unseen last.
        return torch.where(unseen, scores.shape[-1] - 1, chosen).sort(dim=-1).values

    def swiglu(self, gate_up: Tensor, limit: float) -> Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up, out = gate_up.contiguous(), torch.empty(rows, inner)
        self.kernels.swiglu(out.data_ptr(), gate_up.data_ptr(), rows, inner, limit)
        return out

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        rows, choices = ids.shape
        up, down = self.packed(moe.floats.w13), self.packed(moe.floats.w2)
        if up.bf16 != down.bf16:
            raise ShapeMismatch("an expert's matrices are packed differently: one isn't exact in bfloat16")
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        out = torch.empty(rows, down.n)
        addresses = [t.data_ptr() for t in (out, x, ids, weights)]
        panels = (up.panels.data_ptr(), down.panels.data_ptr())
        sizes = (len(up.panels), down.n, down.k, up.bf16)
        self.kernels.moe(*addresses, rows, choices, *panels, *sizes, limit)
        return out

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        rows, choices = ids.shape
        # Each choice as a row of its own with one choice.
        one_by_one = (ids.reshape(-1, 1), weights.reshape(-1, 1))
        out = self.experts(x.repeat_interleave(choices, 0), *one_by_one, moe, limit)
        return out.view(rows, choices, -1)

    def sum_choices(self, rows: Tensor) -> Tensor:
        return in_order(rows)
