"""The device's kernels with one cut for steps of all sizes: a row's bits depend on its own inputs alone.

`TritonOps` chooses how a product is cut by a step's rows, so sums are taken in another order in a step of
another size, and text may part where two tokens are nearly tied. Here every cut is that of STEADY rows, and a
library's product runs on tiles of 32 rows. That costs most in prompts' chunks.
"""

from __future__ import annotations

from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.triton import experts as grouped
from engine.kernels.triton.attend import MANY, AttendShape
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import commit_c128
from engine.kernels.triton.index_scores import ScoreShape
from engine.kernels.triton.linear import LinearShape, multiprocessors, shape_for
from engine.kernels.triton.mhc_mix import MixShape, block_shape
from engine.kernels.triton.project import add_parts
from engine.kernels.triton_attention_ops import committed
from engine.kernels.triton_ops import TritonOps
from engine.model.coded_rows import Rows, values_of
from engine.model.expert_weights import MoeWeights
from engine.model.invariant import tiled
from engine.model.keys import AnyKeys
from engine.model.quantised import Fp4Experts, Fp8Weight, Weight
from engine.model.rounding import Rounding
from engine.model.step import C128Entries, CommitRows

STEADY = 16
"""Rows that every cut is for: those of small decode steps, where time goes by bytes."""


class SteadyOps(TritonOps):
    """TritonOps whose rows are independent, bit for bit. Experts must be in FP4."""

    row_invariant = True
    score_shape = ScoreShape(keys=64, queries=1, tiles=1, warps=4, stages=5)

    def _attend_shape(self, window: AnyKeys) -> AttendShape:
        return MANY[window.pool.dtype]

    def _linear_shape(self, weight: Fp8Weight) -> LinearShape:
        outputs, columns = weight.codes.shape
        return shape_for(STEADY, outputs, columns, multiprocessors(weight.codes.device))

    def _mix_shape(self, streams: Tensor) -> MixShape:
        return block_shape(STEADY, multiprocessors(streams.device))

    def _expert_shape(self, experts: Fp4Experts) -> grouped.ExpertShape:
        return grouped.shape_for(STEADY, experts.count)

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """As TritonOps.linear; of floats in tiles."""
        plain = super().linear
        if isinstance(weight, Fp8Weight):
            return plain(x, weight)
        return tiled(lambda rows: plain(rows.contiguous(), weight), values_of(x))

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TritonOps.project, in tiles."""
        plain = super().project
        return tiled(lambda rows: plain(rows.contiguous(), weight), x)

    def _parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TritonOps._parts, in tiles, of one part."""
        parts = super()._parts
        return tiled(lambda rows: parts(rows.contiguous(), weight).sum(0), x).unsqueeze(0)

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        """As TritonOps.linear_to, in tiles."""
        add_parts(self._parts(x, weight), biases, at, out)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TritonOps.group_linear; of floats in tiles."""
        plain = super().group_linear
        return (
            plain(x, weight) if isinstance(weight, Fp8Weight) else tiled(lambda rows: plain(rows, weight), x)
        )

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

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.experts. raises ConfigError where they aren't in FP4"""
        _check_fp4(moe)
        return super().experts(x, ids, weights, moe, limit)

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.expert_rows. raises ConfigError where they aren't in FP4"""
        _check_fp4(moe)
        return super().expert_rows(x, ids, weights, moe, limit)

    def shared_expert(self, x: Rows, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.shared_expert; of floats in tiles."""
        plain = super().shared_expert
        if isinstance(moe.shared_w2, Fp8Weight):
            return plain(x, moe, limit)
        return tiled(lambda rows: plain(rows.contiguous(), moe, limit), values_of(x))


def _check_fp4(moe: MoeWeights) -> None:
    if not isinstance(moe.routed, Fp4Experts):
        raise ConfigError("--deterministic by these kernels takes experts in FP4: add --kernels torch")
