"""The device's kernels with one cut for steps of all sizes: a row's bits depend on its own inputs alone.

`TritonOps` chooses how a product is cut by a step's rows, so sums are taken in another order in a step of
another size, and text may part where two tokens are nearly tied. Here every cut is that of STEADY rows, and a
library's product runs on tiles of 32 rows. That costs most in prompts' chunks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.triton import experts as grouped
from engine.kernels.triton.attend import MANY, attend
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import commit_c128
from engine.kernels.triton.head import collapse
from engine.kernels.triton.index_scores import ScoreShape, index_scores
from engine.kernels.triton.linear import LinearShape, linear_bf16, linear_coded, multiprocessors, shape_for
from engine.kernels.triton.mhc import mhc_next, mhc_pre
from engine.kernels.triton.mhc_mix import MixShape, Result, block_shape
from engine.kernels.triton.quantise import quantise, swiglu
from engine.kernels.triton_attention_ops import committed
from engine.kernels.triton_ops import TritonOps
from engine.model.coded_rows import CodedRows, Rows, values_of
from engine.model.expert_weights import MoeWeights
from engine.model.invariant import tiled
from engine.model.keys import AnyKeys, Keys, counts
from engine.model.quantised import Fp4Experts, Fp8Weight, Weight
from engine.model.rounding import Rounding
from engine.model.step import C128Entries, CommitRows
from engine.model.weights import HeadWeights, MhcWeights

STEADY = 16
"""Rows that every cut is for: those of small decode steps, where time goes by bytes."""
SCORES = ScoreShape(keys=64, queries=1, tiles=1, warps=4, stages=5)


class SteadyOps(TritonOps):
    """TritonOps whose rows are independent, bit for bit. Experts must be in FP4."""

    row_invariant = True

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """As TritonOps.linear."""
        if not isinstance(weight, Fp8Weight):
            plain = super().linear
            return tiled(lambda rows: plain(rows.contiguous(), weight), values_of(x))
        coded = (x.codes, x.scales) if isinstance(x, CodedRows) else quantise(x)
        return linear_coded(*coded, weight, _linear_shape(weight))

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TritonOps.project, in tiles."""
        plain = super().project
        return tiled(lambda rows: plain(rows.contiguous(), weight), x)

    def _parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TritonOps._parts, in tiles, of one part."""
        parts = super()._parts
        return tiled(lambda rows: parts(rows.contiguous(), weight).sum(0), x).unsqueeze(0)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TritonOps.group_linear."""
        if isinstance(weight, Fp8Weight):
            return linear_bf16(x, weight, _linear_shape(weight))
        plain = super().group_linear
        return tiled(lambda rows: plain(rows, weight), x)

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """As TritonOps.attend."""
        return attend(q, window, compressed, sink, self.faults, shape=MANY[window.pool.dtype])

    def attend_back(
        self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, turns: Tensor
    ) -> Tensor:
        """As TritonOps.attend_back."""
        return attend(q, window, compressed, sink, self.faults, turns, shape=MANY[window.pool.dtype])

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """As TritonOps.index_scores."""
        seen = keys.bias if isinstance(keys, Keys) else counts(keys, q)
        return index_scores(q, head_weights, keys.pool, keys.scales, keys.rows, seen, self.faults, SCORES)

    def close_c128(
        self, states: Tensor, pending: Tensor, entries: C128Entries, turns: Tensor, norm: Tensor, eps: float,
        pool: Tensor, rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TritonOps.close_c128, row by row: steps may cut a window anywhere."""
        simulated = rounding.simulated
        close_c128(states, pending, entries, turns, norm, eps, pool, self.faults, simulated, together=1)

    def commit_c128(self, states: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """As TritonOps.commit_c128, row by row."""
        commit_c128(states, raw, committed(rows, lens), self.faults, together=1)

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Rows, Tensor, Tensor]:
        """As TritonOps.mhc_pre."""
        return mhc_pre(streams, mhc, iterations, hc_eps, eps, _mix_shape(streams))

    def mhc_next(
        self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, mhc: MhcWeights, iterations: int,
        hc_eps: float, eps: float,
    ) -> tuple[Tensor, Rows, Tensor, Tensor]:  # fmt: skip
        """As TritonOps.mhc_next."""
        result, shape = Result(y, post, comb), _mix_shape(streams)
        return mhc_next(result, streams, mhc, iterations, hc_eps, eps, shape)

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TritonOps.collapse."""
        return collapse(streams, head, hc_eps, eps, normed=False, shape=_mix_shape(streams))

    def head_rows(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TritonOps.head_rows."""
        return collapse(streams, head, hc_eps, eps, normed=True, shape=_mix_shape(streams)).float()

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.experts. raises ConfigError where they aren't in FP4"""
        own = _in_fp4(moe)
        return grouped.run_experts(
            x, ids, weights, own, limit, shape=grouped.shape_for(STEADY, own.count), dtype=torch.float32
        )

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.expert_rows. raises ConfigError where they aren't in FP4"""
        own = _in_fp4(moe)
        return grouped.choice_rows(x, ids, weights, own, limit, shape=grouped.shape_for(STEADY, own.count))

    def shared_expert(self, x: Rows, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.shared_expert."""
        own = moe.shared_w2
        if not isinstance(own, Fp8Weight):
            plain = super().shared_expert
            return tiled(lambda rows: plain(rows.contiguous(), moe, limit), values_of(x))
        return linear_coded(*swiglu(self.linear(x, moe.shared_w13), limit), own, _linear_shape(own))


def _linear_shape(weight: Fp8Weight) -> LinearShape:
    outputs, columns = weight.codes.shape
    return shape_for(STEADY, outputs, columns, multiprocessors(weight.codes.device))


def _mix_shape(streams: Tensor) -> MixShape:
    return block_shape(STEADY, multiprocessors(streams.device))


def _in_fp4(moe: MoeWeights) -> Fp4Experts:
    if not isinstance(moe.routed, Fp4Experts):
        raise ConfigError("--deterministic by these kernels takes experts in FP4: add --kernels torch")
    return moe.routed
