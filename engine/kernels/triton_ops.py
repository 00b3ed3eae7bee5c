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
from engine.kernels.near_experts import NearExperts
from engine.kernels.triton.combine import join
from engine.kernels.triton.experts import ExpertShape, choice_rows, run_experts
from engine.kernels.triton.faults import check_faults, no_faults
from engine.kernels.triton.formats import INTERPRETED
from engine.kernels.triton.head import collapse
from engine.kernels.triton.linear import LinearShape, linear_bf16, linear_coded, linear_fp8
from engine.kernels.triton.mhc import mhc_next, mhc_post, mhc_pre
from engine.kernels.triton.mhc_mix import MixShape, Result
from engine.kernels.triton.pack import pack, unpack
from engine.kernels.triton.project import add_parts, project, project_to
from engine.kernels.triton.quantise import swiglu
from engine.kernels.triton.routing import route
from engine.kernels.triton_attention_ops import TritonAttentionOps
from engine.model.coded_rows import CodedRows, Rows
from engine.model.config import ModelConfig
from engine.model.expert_weights import MoeWeights
from engine.model.groups import Group
from engine.model.parallel import Experts
from engine.model.quantised import Fp4Experts, Fp8Weight, Weight
from engine.model.weights import HeadWeights, MhcWeights

LEAST = (9, 0)
"""Compute capability: kernels tell when the next one's programs may be placed."""


class TritonOps(TritonAttentionOps):
    """Kernels of an NVIDIA device; interpreted where TRITON_INTERPRET is set. Activations are bfloat16.

    A weight that its checkpoint stores as floats takes the library's product: there is nothing to decode.
    """

    name = "triton"
    keeps = True
    # Keys are read where they lie: masked ones would only cost.
    dense_entries = 0
    ranged = True

    def __init__(self, device: torch.device) -> None:
        self.faults = no_faults(device)

    def check(self) -> None:
        """As TorchOps.check."""
        if bits := int(self.faults):
            self.faults.zero_()
            check_faults(bits)

    def _linear_shape(self, weight: Fp8Weight) -> LinearShape | None:
        """How a product with this weight is cut; None, here and below: by the step's rows."""
        return None

    def _mix_shape(self, streams: Tensor) -> MixShape | None:
        """How products of these streams are cut."""
        return None

    def _expert_shape(self, experts: Fp4Experts) -> ExpertShape | None:
        """How products of these experts are cut."""
        return None

    def linear(self, x: Rows, weight: Weight) -> Tensor:
        """As TorchOps.linear; x is rounded to FP8 where weight is in FP8, the result bfloat16 then."""
        if not isinstance(weight, Fp8Weight):
            return super().linear(x, weight)
        cut = self._linear_shape(weight)
        if isinstance(x, CodedRows):
            return linear_coded(x.codes, x.scales, weight, cut)
        return linear_fp8(x, weight, cut)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TorchOps.project; products of bfloat16 are exact in float32."""
        if weight.dtype == torch.float32:
            return super().project(x, weight)
        x = x.to(weight.dtype)
        if x.device.type == "cuda":
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        # Interpreted: the library widens results on devices only.
        return F.linear(x.float(), weight.float())

    def index_weights(self, x: Tensor, weight: Tensor) -> Tensor:
        """As TorchOps.index_weights, in parts."""
        return self._parts(x, weight)

    def linear_to(self, x: Tensor, weight: Tensor, biases: Tensor, at: Tensor, out: Tensor) -> None:
        """As TorchOps.linear_to; products of bfloat16 are exact in float32."""
        if weight.dtype == torch.bfloat16:
            project_to(x.bfloat16(), weight, biases, at, out)
        else:
            add_parts(self._parts(x, weight), biases, at, out)

    def _parts(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `project`, in parts [P, T, N] to be added up."""
        kept = weight.dtype == torch.bfloat16
        return project(x.bfloat16(), weight) if kept else super().project(x, weight).unsqueeze(0)

    def group_linear(self, x: Tensor, weight: Weight) -> Tensor:
        """As TorchOps.group_linear; x stays as it is."""
        if isinstance(weight, Fp8Weight):
            return linear_bf16(x, weight, self._linear_shape(weight))
        return super().group_linear(x, weight)

    def mhc_pre(
        self, streams: Tensor, mhc: MhcWeights, iterations: int, hc_eps: float, eps: float
    ) -> tuple[Rows, Tensor, Tensor]:
        """As TorchOps.mhc_pre; the input comes with its codes."""
        return mhc_pre(streams, mhc, iterations, hc_eps, eps, self._mix_shape(streams))

    def mhc_next(
        self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, mhc: MhcWeights, iterations: int,
        hc_eps: float, eps: float,
    ) -> tuple[Tensor, Rows, Tensor, Tensor]:  # fmt: skip
        """As TorchOps.mhc_next, in two kernels; the input comes with its codes."""
        result, cut = Result(y, post, comb), self._mix_shape(streams)
        return mhc_next(result, streams, mhc, iterations, hc_eps, eps, cut)

    def mhc_post(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """As TorchOps.mhc_post."""
        return mhc_post(y, streams, post, comb)

    def collapse(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TorchOps.collapse."""
        return collapse(streams, head, hc_eps, eps, normed=False, shape=self._mix_shape(streams))

    def head_rows(self, streams: Tensor, head: HeadWeights, hc_eps: float, eps: float) -> Tensor:
        """As TorchOps.head_rows."""
        return collapse(streams, head, hc_eps, eps, normed=True, shape=self._mix_shape(streams)).float()

    def route(
        self, x: Tensor, token_ids: Tensor, moe: MoeWeights, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.route; ids are int32, best first."""
        return self.route_padded(x, token_ids, None, moe, count, scaling)

    def route_padded(
        self, x: Tensor, token_ids: Tensor, padding: Tensor | None, moe: MoeWeights, count: int,
        scaling: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As TorchOps.route_padded; ids are int32, best first."""
        return route(self._parts(x, moe.gate), token_ids, moe.bias, moe.table, count, scaling, padding)

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.experts; x is rounded to FP8 where experts are in FP4."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().experts(x, ids.long(), weights, moe, limit)
        cut = self._expert_shape(moe.routed)
        return run_experts(x, ids, weights, moe.routed, limit, shape=cut, dtype=torch.float32)

    def expert_rows(self, x: Tensor, ids: Tensor, weights: Tensor, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.expert_rows; x is rounded to FP8 where experts are in FP4."""
        if not isinstance(moe.routed, Fp4Experts):
            return super().expert_rows(x, ids.long(), weights, moe, limit)
        cut = self._expert_shape(moe.routed)
        return choice_rows(x, ids, weights, moe.routed, limit, len(moe.gate), cut)

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor, rows: int) -> Tensor:
        """As TorchOps.pack."""
        return pack(x, ids, weights, rows)

    def unpack(self, packed: Tensor, like: Tensor, choices: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """As TorchOps.unpack; ids are int32."""
        return unpack(packed, like.shape[1], choices, first)

    def join_choices(self, parts: Tensor, shared: Tensor) -> Tensor:
        """As TorchOps.join_choices."""
        return join(parts, shared)

    def near_experts(self, group: Group, first: int, config: ModelConfig) -> Experts | None:
        """As TorchOps.near_experts."""
        if group.near is None:
            return None
        return NearExperts(group, group.near, first, config, self.faults, self._expert_shape)

    def shared_expert(self, x: Rows, moe: MoeWeights, limit: float) -> Tensor:
        """As TorchOps.shared_expert; the activation goes to FP8 at once."""
        if not isinstance(moe.shared_w2, Fp8Weight):
            return super().shared_expert(x, moe, limit)
        coded = swiglu(self.linear(x, moe.shared_w13), limit)
        return linear_coded(*coded, moe.shared_w2, self._linear_shape(moe.shared_w2))


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """raises  ConfigError where the kernels can't run: they take bfloat16, on a device or interpreted"""
    if dtype != torch.bfloat16 or (device.type != "cuda" and not INTERPRETED.value):
        raise ConfigError(
            f"Triton kernels take bfloat16 on a device (or with TRITON_INTERPRET=1), not {dtype} on {device}"
        )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < LEAST:
        least, told = (".".join(map(str, capability)) for capability in (LEAST, found))
        raise ConfigError(f"Triton kernels take compute capability {least}, not {told}: add --kernels torch")
