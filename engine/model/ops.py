"""The model's hot arithmetic in plain torch, one method an operation: what native and Triton kernels replace.

A kernel set is an object with the methods of `TorchOps`; subclass it to replace them one at a time. Every
method is a pure function of its arguments, except those that say what they write.
Arithmetic is float32 inside; results have the type of the first argument unless a line says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.coded_rows import Rows, values_of
from engine.model.config import ModelConfig
from engine.model.expert_weights import MoeWeights
from engine.model.groups import Group
from engine.model.index_ops import IndexOps
from engine.model.quantised import Weight, plain
from engine.model.weights import HeadWeights, MhcWeights

if TYPE_CHECKING:
    from engine.model.parallel import Experts


class TorchOps(IndexOps):
    """The reference. Shapes: T rows, H hidden, D head width, hc streams, r rotary channels.

    name           what logs and metrics call the set
    row_tile       steps are padded to a multiple of this
    row_invariant  a row's bits don't depend on the other rows of the step
    keeps          weights stay quantised as the checkpoint stores them (see `Taker`)
    """

    name = "torch"
    row_tile = 1
    row_invariant = False
    keeps = False

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """x [T, K] times weight [N, K] transposed; [T, N] in weight's type."""
        weight = plain(weight)
        return F.linear(values_of(x).to(weight.dtype), weight)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, K] times weight [N, K] transposed, as float32 multiplies and adds; float32 [T, N]."""
        return self.linear(x.float(), weight)

    def index_weights(self, x: Tensor, weight: Tensor) -> Tensor:
        """The indexer's weights of heads, as `index_queries` takes them, of x [T, H]; weight [heads, H]."""
        return self.project(x, weight)

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        """out [T, N] float32 = biases[at] + x [T, K] weight [N, K]^T, all in float32.

        biases [n, N], of which each row takes number `at` [T] int64
        """
        torch.addmm(biases.index_select(0, at), x.float(), weight.t(), out=out)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, G W] through G matrices weight [G, R, W]; [T, G R]."""
        weight = plain(weight)
        groups, rank, width = weight.shape
        out = torch.bmm(x.view(-1, groups, width).transpose(0, 1), weight.transpose(1, 2))
        return out.transpose(0, 1).reshape(-1, groups * rank)

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Rows, Tensor, Tensor]:
        """Mixing weights of a sub-block and its normalised input.

        streams  [T, hc, H]
        returns  (RMSNorm of the collapsed input [T, H], post [T, hc], comb [T, hc, hc]); the last two float32
        """
        hc = streams.shape[1]
        flat = streams.flatten(1).float()
        mix = self.linear(flat, mhc.fn) * self.inverse_rms(flat, eps)
        mix = torch.addcmul(mhc.base, mix, mhc.scale)
        gates = torch.sigmoid(mix[:, : 2 * hc])
        pre, post = gates[:, :hc] + hc_eps, gates[:, hc:] * 2
        comb = torch.softmax(mix[:, 2 * hc :].view(-1, hc, hc), dim=-1) + hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
        collapsed = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1)
        return self.rms_norm(collapsed.to(streams.dtype), mhc.norm, eps), post, comb

    def inverse_rms(self, x: Tensor, eps: float) -> Tensor:
        """[T, 1]: one over the root mean square of x's rows, x [T, K] float32."""
        return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(1) / x.shape[1] + eps)

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Streams after a sub-block: post[k] y + sum over j of comb[j, k] streams[j]; [T, hc, H]."""
        own = post.unsqueeze(2) * y.float().unsqueeze(1)
        return torch.baddbmm(own, comb.transpose(1, 2), streams.float()).to(streams.dtype)

    def mhc_next(
        self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, mhc: MhcWeights, iterations: int,
        hc_eps: float, eps: float,
    ) -> tuple[Tensor, Rows, Tensor, Tensor]:  # fmt: skip
        """`mhc_post` of a sub-block, then `mhc_pre` of the one that follows it, whose weights `mhc` are.

        returns  (streams between them [T, hc, H], then what `mhc_pre` returns)
        """
        streams = self.mhc_post(y, streams, post, comb)
        return streams, *self.mhc_pre(streams, mhc, iterations, hc_eps, eps)

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """streams [R, hc, H] collapsed to one; [R, H] in streams' type."""
        flat = streams.flatten(1).float()
        mix = self.linear(flat, head.fn) * self.inverse_rms(flat, eps)
        weights = torch.sigmoid(mix * head.scale + head.base) + hc_eps
        return torch.bmm(weights.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)

    def head_rows(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """streams [R, hc, H] collapsed and normalised for the projection; [R, H] float32."""
        return self.rms_norm(self.collapse(streams, head, hc_eps, eps), head.norm, eps).float()

    def logits(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """streams [R, hc, H] collapsed, normalised and projected; [R, V] float32."""
        return self.project(self.head_rows(streams, head, hc_eps, eps), head.head)

    def route(
        self, x: Tensor, token_ids: Tensor, moe: MoeWeights, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Experts of each row: (ids [T, k] int64, weights [T, k] float32). Bias chooses, never weighs."""
        scores = torch.sqrt(F.softplus(self.project(x, moe.gate)))
        if moe.table is not None:
            ids = moe.table.index_select(0, token_ids)
        else:
            assert moe.bias is not None
            ids = (scores + moe.bias).topk(count, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        return ids, weights * (scaling / weights.sum(1, keepdim=True))

    def route_padded(
        self, x: Tensor, token_ids: Tensor, padding: Tensor | None, moe: MoeWeights, count: int,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `route`; rows of `padding` [T] bool have ids of -1 and weights of 0. None: there are none"""
        ids, weights = self.route(x, token_ids, moe, count, scaling)
        if padding is None:
            return ids, weights
        outside = padding.unsqueeze(1)
        return ids.masked_fill(outside, -1), weights.masked_fill(outside, 0)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """Sum over each row's experts, x [T, H]; float32 [T, H]. An id outside 0..E - 1 adds nothing."""
        return self.sum_choices(self.expert_rows(x, ids, weights, moe, limit))

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """What each chosen expert gives, weighted: x [T, H], ids and weights [T, k]; [T, k, H] in x's type.

        Rows of ids outside 0..E - 1 are zero. No host read, no loop over experts.
        """
        rows, count = ids.shape
        w13, w2 = moe.floats.w13, moe.floats.w2
        held = w13.shape[0]
        flat = ids.flatten()
        flat = torch.where((flat < 0) | (flat >= held), held, flat)
        order = flat.argsort(stable=True)
        # Not bincount: on a GPU it reads its result's size back to the host.
        counts = torch.zeros(held + 1, dtype=torch.int32, device=x.device)
        counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
        ends = counts[:held].cumsum(0, dtype=torch.int32)
        inner = F.grouped_mm(x.index_select(0, order // count), w13.transpose(1, 2), offs=ends)
        act = self.swiglu(inner, limit) * weights.flatten().index_select(0, order).unsqueeze(1)
        out = F.grouped_mm(act.to(x.dtype), w2.transpose(1, 2), offs=ends)
        # Rows of no expert stand last, and hold what was in memory.
        place = torch.arange(out.shape[0], device=x.device)
        out = out.masked_fill((place >= ends[-1]).unsqueeze(1), 0)
        return torch.empty_like(out).index_copy_(0, order, out).view(rows, count, -1)

    def sum_choices(self, rows: Tensor) -> Tensor:
        """The sum over choices, float32 [T, H], of rows [T, k, H]."""
        return rows.sum(1, dtype=torch.float32)

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor, rows: int) -> Tensor:
        """Rows for other ranks, uint8 [rows, bytes]: x [T, H], ids and weights [T, k] side by side.

        T is at most `rows`; ids of -1 are no choice, and so are all of the rows past T.
        """
        count, choices = ids.shape
        wide = x.shape[1] * x.element_size()
        # Zero bytes are zero values and, as ids travel one higher, no expert.
        out = torch.zeros(rows, wide + 8 * choices, dtype=torch.uint8, device=x.device)
        out[:count, :wide] = x.contiguous().view(torch.uint8)
        out[:count, wide : wide + 4 * choices] = (ids + 1).int().view(torch.uint8)
        out[:count, wide + 4 * choices :] = weights.contiguous().view(torch.uint8)
        return out

    def unpack(self, packed: Tensor, like: Tensor, choices: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [n, H] as `like` has it, ids [n, k] numbered from expert `first` on, weights [n, k] float32."""
        wide = like.shape[1] * like.element_size()
        moved = packed[:, wide : wide + 4 * choices].contiguous().view(torch.int32)
        return (
            packed[:, :wide].contiguous().view(like.dtype),
            moved.long() - (1 + first),
            packed[:, wide + 4 * choices :].contiguous().view(torch.float32),
        )

    def join_choices(self, parts: Tensor, shared: Tensor) -> Tensor:
        """The sums over choices of this rank's T rows, plus `shared` [T, H]; its type.

        parts  [P, R, k, H] from every rank, R at least T; of a choice's rows all but one are zero, so that
               their sum over ranks is exact
        """
        own = parts[0, : len(shared)]
        for part in parts[1:, : len(shared)]:
            own = own + part
        return (self.sum_choices(own) + shared).to(shared.dtype)

    def near_experts(self, group: Group, first: int, config: ModelConfig) -> Experts | None:
        """The way to a group's experts by memory that its ranks share; None where these operations know none.

        first  id of this rank's first expert
        """
        return None

    def shared_expert(self, x: Rows, moe: MoeWeights, limit: float) -> Tensor:
        """The expert that every row uses; [T, H] in x's type."""
        act = self.swiglu(self.linear(x, moe.shared_w13), limit).to(values_of(x).dtype)
        return self.linear(act, moe.shared_w2)

    def swiglu(self, gate_up: Tensor, limit: float) -> Tensor:
        """silu of the clamped gate times the clamped up; gate_up [n, 2 I], result [n, I] float32."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
