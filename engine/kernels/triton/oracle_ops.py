"""The whole kernel set in plain torch: the oracle of `TritonOps`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.triton import oracle, oracle_attention, oracle_compress
from engine.model.coded_rows import Rows, values_of
from engine.model.expert_weights import MoeWeights
from engine.model.keys import AnyKeys, Keys, counts
from engine.model.ops import TorchOps
from engine.model.quantised import Fp4Experts, Fp8Weight, Weight
from engine.model.rounding import Rounding, index_codes


class OracleOps(TorchOps):
    """The model's operations on quantised weights in plain torch, with the roundings of the kernel set."""

    name = "oracle"
    keeps = True
    ranged = True

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """As TritonOps.linear."""
        if not isinstance(weight, Fp8Weight):
            return super().linear(x, weight)
        return oracle.linear(oracle.rounded(values_of(x)), weight).to(torch.bfloat16)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TorchOps.project."""
        return F.linear(x.float(), weight.float())

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        """As TorchOps.linear_to."""
        torch.add(self.project(x, weight), biases.index_select(0, at), out=out)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TritonOps.group_linear."""
        if not isinstance(weight, Fp8Weight):
            return super().group_linear(x, weight)
        return oracle.linear(x, weight).to(torch.bfloat16)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.experts."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().experts(x, ids, weights, moe, limit)
        return oracle.run_experts(x, ids, weights, moe.routed, limit)

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TritonOps.expert_rows."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().expert_rows(x, ids, weights, moe, limit)
        return oracle.run_choices(x, ids, weights, moe.routed, limit).to(torch.bfloat16)

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """As TritonOps.attend: scores and sums in float32."""
        return oracle_attention.attend(q, window, compressed, sink, None).to(q.dtype)

    def attend_back(
        self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, turns: Tensor
    ) -> Tensor:
        """As TritonOps.attend_back: rounded once."""
        return oracle_attention.attend(q, window, compressed, sink, turns).to(q.dtype)

    def index_queries(
        self, q: Tensor, turns: Tensor, weights: Tensor, rounding: Rounding, coded: bool,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As TritonOps.index_queries: codes, their scales in the weights."""
        if not coded:
            return super().index_queries(q, turns, weights, rounding, coded, rows)
        if rows is not None:
            q, turns, weights = (part.index_select(0, rows) for part in (q, turns, weights))
        self.rotate(q, turns)
        codes, scales = index_codes(q)
        return codes, weights * scales

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """As TritonOps.index_scores: scores and sums in float32."""
        seen = keys.bias if isinstance(keys, Keys) else counts(keys, q)
        return oracle_compress.index_scores(q, head_weights, keys.pool, keys.scales, keys.rows.long(), seen)
