"""The way to experts on devices that reach each other's memory: no collective, no copy of what arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.near_planes import planes, rows_within
from engine.kernels.triton.experts import ExpertShape, Home, coded_rows, shape_for
from engine.kernels.triton.near import Pushed, Reach, join_home, push
from engine.kernels.triton.routing import sort_choices
from engine.model.config import ModelConfig
from engine.model.expert_weights import MoeWeights
from engine.model.groups import Group, Near
from engine.model.ops import TorchOps
from engine.model.parallel import ExpertRows, SpreadExperts
from engine.model.quantised import Fp4Experts


@dataclass(frozen=True)
class NearRows(ExpertRows):
    """This rank's rows, and what all ranks pushed; `first` is the id of this rank's first expert."""

    pushed: Pushed
    first: int

    def arrived(self) -> Tensor:
        """As ExpertRows.arrived."""
        return self.pushed.ids - self.first


class NearExperts(SpreadExperts):
    """As SpreadExperts, whose bits it gives, for experts in FP4 and steps that the regions have room for.

    All ranks agree on a step's rows, and so on the way that it takes.

    shape   a cut of the products for all sizes, or None: by size
    """

    def __init__(
        self, group: Group, near: Near, first: int, config: ModelConfig, faults: Tensor,
        shape: Callable[[Fp4Experts], ExpertShape | None],
    ) -> None:  # fmt: skip
        super().__init__(group, first)
        sizes = group.size, config.hidden_size, config.num_experts_per_tok
        cut = planes(sizes[0], rows_within(near.regions[0].numel(), *sizes), *sizes[1:])
        self._shape, self._of = shape, config.n_routed_experts
        self._reach = Reach(
            group.rank,
            cut,
            near.regions[group.rank],
            torch.tensor([region.data_ptr() for region in near.regions], device=faults.device),
            torch.zeros(2, dtype=torch.int64, device=faults.device),
            faults,
            int(near.patience_s * 1e9),
        )

    def send(
        self, ops: TorchOps, x: Tensor, ids: Tensor, weights: Tensor, rows: int, moe: MoeWeights
    ) -> ExpertRows:
        """As Experts.send."""
        if not isinstance(moe.routed, Fp4Experts) or not 0 < rows <= self._reach.planes.rows:
            return super().send(ops, x, ids, weights, rows, moe)
        ids = ids.contiguous()
        pushed = push(self._reach, x.contiguous(), ids, weights.contiguous(), rows)
        return NearRows(x, ids, weights, pushed, self.first)

    def run(self, ops: TorchOps, sent: ExpertRows, moe: MoeWeights, limit: float) -> Tensor:
        """As Experts.run; the rows lie in their own ranks' memory, and the result is empty."""
        experts = moe.routed
        if not isinstance(sent, NearRows) or not isinstance(experts, Fp4Experts):
            return super().run(ops, sent, moe, limit)
        pushed, cut = sent.pushed, self._reach.planes
        shape = self._shape(experts) or shape_for(pushed.ids.numel(), self._of)
        blocks = sort_choices(pushed.ids, experts.count, shape.rows, self.first, pushed.arrival)
        home = Home(self._reach.bases, cut.back, pushed.ids.numel() // cut.ranks)
        return coded_rows((pushed.codes, pushed.scales), pushed.weights, experts, blocks, limit, shape, home)

    def back(self, ops: TorchOps, sent: ExpertRows, given: Tensor, shared: Tensor) -> Tensor:
        """As Experts.back."""
        if not isinstance(sent, NearRows):
            return super().back(ops, sent, given, shared)
        return join_home(self._reach, sent.ids, shared)
