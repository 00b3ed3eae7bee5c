"""How the target's forwards run: by a recorded step where the ranks agreed on a size, else eagerly."""

from __future__ import annotations

from engine.errors import ShapeMismatch
from engine.memory.pools import KVState
from engine.model.model import DeepseekV4
from engine.model.step import StepOutput
from engine.runner.batch import ForwardBatch
from engine.runner.forward import forward
from engine.runner.graph_rows import GraphPlan
from engine.runner.graphs import Graphs
from engine.runner.plan import Plan, PlannedStep, plan_batch


class TargetPath:
    """Plans and runs steps of one model over one cache.

    graphs  the recorded sizes; None: every step runs eagerly
    """

    def __init__(self, model: DeepseekV4, state: KVState) -> None:
        self.model, self.state = model, state
        self.graphs: Graphs | None = None

    def plan(self, batch: ForwardBatch, bucket: int) -> PlannedStep:
        """The plan of a batch of `bucket` agreed rows; 0: the ranks agreed to run eagerly.

        raises  PageAccounting, as `plan_batch` does; ShapeMismatch where ranks agreed on a size that the
                batch doesn't fit: what they will do in step would differ
        """
        if self.graphs is None or not bucket:
            return plan_batch(self.state, batch, single_rows=self.model.single_rows, ops=self.model.ops)
        plan = self.graphs.plan(batch)
        if plan is None:
            raise ShapeMismatch(f"ranks agreed on a graph of {bucket} rows, but none fits {batch.load}")
        return plan

    def run(self, plan: PlannedStep) -> StepOutput:
        """As `forward`; of a recorded step valid until the next one."""
        if isinstance(plan, GraphPlan):
            assert self.graphs is not None
            return self.graphs.run(plan)
        assert isinstance(plan, Plan)
        return forward(self.model, self.state, plan)
