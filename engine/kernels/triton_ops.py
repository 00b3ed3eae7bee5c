"""The model's operations on a device by Triton kernels, on weights as the checkpoint stores them.

Products with FP8 and FP4 weights take activations rounded to FP8, as the released weights were trained with;
only the first half of the output projection takes them in bfloat16. The oracle of each kernel is in
`triton/oracle*.py`, that of the whole set in `triton/oracle_ops.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ConfigError
from engine.kernels.triton.attend import attend
from engine.kernels.triton.combine import join
from engine.kernels.triton.compress_c4 import close_c4
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import Committed, commit_c4, commit_c128
from engine.kernels.triton.compress_entry import IndexPool
from engine.kernels.triton.entry_rows import entry_rows
from engine.kernels.triton.experts import choice_rows, run_experts
from engine.kernels.triton.faults import check_faults, no_faults
from engine.kernels.triton.formats import INTERPRETED
from engine.kernels.triton.head import collapse
from engine.kernels.triton.index_queries import code_queries, round_queries
from engine.kernels.triton.index_scores import index_scores
from engine.kernels.triton.linear import linear_bf16, linear_coded, linear_fp8
from engine.kernels.triton.mhc import mhc_post, mhc_pre
from engine.kernels.triton.norm import rms_norm
from engine.kernels.triton.pack import pack, unpack
from engine.kernels.triton.quantise import swiglu
from engine.kernels.triton.rope import q_norm_rope, rotate
from engine.kernels.triton.routing import route
from engine.kernels.triton.select_entries import select_in_order, select_rows
from engine.kernels.triton.store import norm_rope_store
from engine.model.expert_weights import MoeWeights
from engine.model.keys import AnyKeys, Keys, counts
from engine.model.ops import TorchOps
from engine.model.quantised import Fp4Experts, Fp8Weight, Weight
from engine.model.rounding import Rounding
from engine.model.step import C4Entries, C128Entries, CommitRows
from engine.model.weights import HeadWeights, MhcWeights


class TritonOps(TorchOps):
    """Kernels of an NVIDIA device; interpreted where TRITON_INTERPRET is set. Activations are bfloat16.

    A weight that its checkpoint stores as floats takes the library's product: there is nothing to decode.

    faults  int32 [1] on the device: what indices pointed outside, see `triton/faults.py`
    """

    name = "triton"
    keeps = True
    # Keys are read where they lie: masked ones would only cost.
    dense_entries = 0
    ranged = True
    faults: Tensor

    def __init__(self, device: torch.device) -> None:
        self.faults = no_faults(device)

    def check(self) -> None:
        """As TorchOps.check."""
        if bits := int(self.faults):
            self.faults.zero_()
            check_faults(bits)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TorchOps.linear; x is rounded to FP8 where weight is in FP8, the result bfloat16 then."""
        return linear_fp8(x, weight) if isinstance(weight, Fp8Weight) else super().linear(x, weight)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TorchOps.project; products of bfloat16 are exact in float32."""
        if weight.dtype == torch.float32:
            return super().project(x, weight)
        x = x.to(weight.dtype)
        if x.device.type == "cuda":
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        # Interpreted: the library widens results on devices only.
        return F.linear(x.float(), weight.float())

    def linear_to(self, x: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
        """As TorchOps.linear_to."""
        torch.add(self.project(x, weight), bias, out=out)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TorchOps.group_linear; x stays as it is."""
        if isinstance(weight, Fp8Weight):
            return linear_bf16(x, weight)
        return super().group_linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """As TorchOps.rms_norm."""
        return rms_norm(x, weight, eps)

    def rotate(self, x: Tensor, turns: Tensor) -> None:
        """As TorchOps.rotate, x [T, heads, D]."""
        rotate(x, turns)

    def norm_rotate(self, x: Tensor, turns: Tensor, eps: float) -> Tensor:
        """As TorchOps.norm_rotate, in place."""
        q_norm_rope(x, turns, eps)
        return x

    def keep_latent(
        self, x: Tensor, weight: Tensor, turns: Tensor, pool: Tensor, places: Tensor, eps: float,
        rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.keep_latent."""
        norm_rope_store(x, weight, turns, pool, places, eps, self.faults, rounding.simulated)

    def attend(self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor) -> Tensor:
        """As TorchOps.attend; a row of 0 or -1 is no key."""
        return attend(q, window, compressed, sink, self.faults)

    def attend_back(
        self, q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, turns: Tensor
    ) -> Tensor:
        """As TorchOps.attend_back, in one kernel."""
        return attend(q, window, compressed, sink, self.faults, turns)

    def close_c4(
        self, ring: Tensor, pending: Tensor, entries: C4Entries, turns: Tensor, norms: tuple[Tensor, Tensor],
        eps: float, pools: tuple[Tensor, ...], rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.close_c4."""
        scales = pools[2] if len(pools) > 2 else None
        keys = IndexPool(pools[1], scales is None and _to_fp4(rounding), scales)
        close_c4(ring, pending, entries, turns, *norms, eps, pools[0], keys, self.faults, rounding.simulated)

    def close_c128(
        self, states: Tensor, pending: Tensor, entries: C128Entries, turns: Tensor, norm: Tensor, eps: float,
        pool: Tensor, rounding: Rounding,
    ) -> None:  # fmt: skip
        """As TorchOps.close_c128."""
        close_c128(states, pending, entries, turns, norm, eps, pool, self.faults, rounding.simulated)

    def commit_c4(self, ring: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """As TorchOps.commit_c4."""
        commit_c4(ring, raw, _committed(rows, lens), self.faults)

    def commit_c128(self, states: Tensor, raw: Tensor, rows: CommitRows, lens: Tensor) -> None:
        """As TorchOps.commit_c128."""
        commit_c128(states, raw, _committed(rows, lens), self.faults)

    def index_queries(
        self, q: Tensor, turns: Tensor, weights: Tensor, rounding: Rounding, coded: bool
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.index_queries, in one kernel; of coded queries the weights take the scales."""
        if coded:
            return code_queries(q, turns, weights)
        if _to_fp4(rounding):
            return round_queries(q, turns), weights
        rotate(q, turns)
        return q, weights

    def index_scores(self, q: Tensor, head_weights: Tensor, keys: AnyKeys) -> Tensor:
        """As TorchOps.index_scores; a row of 0 or -1 is no key."""
        seen = keys.bias if isinstance(keys, Keys) else counts(keys, q)
        return index_scores(q, head_weights, keys.pool, keys.scales, keys.rows, seen, self.faults)

    def select_rows(self, scores: Tensor, rows: Tensor, count: int) -> Tensor:
        """As TorchOps.select_rows."""
        return select_rows(scores, rows, count)

    def entry_rows(
        self, pages: Tensor, visible: Tensor, entries: int, page_rows: int, pool_pages: int
    ) -> Tensor:
        """As TorchOps.entry_rows; what is seen of a page that isn't mapped is a fault."""
        return entry_rows(pages, visible, entries, page_rows, pool_pages, self.faults)

    def select(self, scores: Tensor, count: int) -> Tensor:
        """As TorchOps.select_in_order."""
        return select_in_order(scores, count)

    def select_in_order(self, scores: Tensor, count: int) -> Tensor:
        """As TorchOps.select_in_order."""
        return select_in_order(scores, count)

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As TorchOps.mhc_pre."""
        return mhc_pre(streams, mhc, iterations, hc_eps, eps)

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """As TorchOps.mhc_post."""
        return mhc_post(y, streams, post, comb)

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TorchOps.collapse."""
        return collapse(streams, head, hc_eps, eps, normed=False)

    def head_rows(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TorchOps.head_rows."""
        return collapse(streams, head, hc_eps, eps, normed=True).float()

    def route(
        self, x: Tensor, token_ids: Tensor, moe: MoeWeights, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.route; ids are int32, best first."""
        return route(self.project(x, moe.gate), token_ids, moe.bias, moe.table, count, scaling)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.experts; x is rounded to FP8 where experts are in FP4."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().experts(x, ids.long(), weights, moe, limit)
        return run_experts(x, ids, weights, moe.routed, limit, dtype=torch.float32)

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.expert_rows; x is rounded to FP8 where experts are in FP4."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().expert_rows(x, ids.long(), weights, moe, limit)
        return choice_rows(x, ids, weights, moe.routed, limit)

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor, rows: int) -> Tensor:
        """As TorchOps.pack."""
        return pack(x, ids, weights, rows)

    def unpack(self, packed: Tensor, like: Tensor, choices: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """As TorchOps.unpack; ids are int32."""
        return unpack(packed, like.shape[1], choices, first)

    def join_choices(self, parts: Tensor, shared: Tensor) -> Tensor:
        """As TorchOps.join_choices."""
        return join(parts, shared)

    def shared_expert(self, x: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.shared_expert; the activation goes to FP8 at once."""
        if not isinstance(moe.shared_w2, Fp8Weight):
            return super().shared_expert(x, moe, limit)
        return linear_coded(*swiglu(self.linear(x, moe.shared_w13), limit), moe.shared_w2)


def _to_fp4(rounding: Rounding) -> bool:
    """Whether index queries and keys of a pool of values are rounded. raises ConfigError where not to FP4"""
    if rounding.mode == "fp8":
        raise ConfigError("the kernels keep FP8 index keys as codes: give FP8 pools, not simulated rounding")
    return rounding.simulated


def _committed(rows: CommitRows, lens: Tensor) -> Committed:
    return Committed(rows.slots, rows.starts, rows.first_rows, rows.counts, lens)


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """raises  ConfigError where the kernels can't run: they take bfloat16, on a device or interpreted"""
    if dtype != torch.bfloat16 or (device.type != "cuda" and not INTERPRETED.value):
        raise ConfigError(
            f"Triton kernels take bfloat16 on a device (or with TRITON_INTERPRET=1), not {dtype} on {device}"
        )
