"""A rank that is loaded: what runs its steps, and what its scheduler and its metrics must know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.actors.capacity import CostTable
from engine.cache_sizes import CacheSizes
from engine.grammar.rank_grammars import RankGrammars
from engine.messages import RunStep, StepDone
from engine.model.config import ModelConfig
from engine.runner.graphs import Graphs
from engine.runner.step import StepRunner, waited

GB = 1 << 30


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank that can run steps, and what its scheduler must know of it.

    eos_ids  tokens that end a request unless it ignores them
    block    drafted tokens of a round; 0: no draft was loaded
    costs    of its steps, for the budget of drafts; None: not measured
    grammars of constrained requests; None: it can't follow any
    weights  bytes that were loaded
    took_s   how long it took
    kernels  name of the kernel set
    """

    runner: StepRunner
    config: ModelConfig
    sizes: CacheSizes
    eos_ids: tuple[int, ...]
    block: int = 0
    costs: CostTable | None = None
    grammars: RankGrammars | None = None
    weights: int = 0
    took_s: float = 0.0
    kernels: str = "torch"

    @property
    def figures(self) -> Callable[[], dict[str, float]]:
        """What gives all figures by name, as in Ledger; nothing of the model is kept by it."""
        fixed = {
            "weight_memory_usage_gb": self.weights / GB,
            "kv_cache_memory_usage_gb": self.sizes.bytes / GB,
            'startup_time_seconds{phase="load"}': self.took_s,
            "graph_memory_usage_gb": self.graphs.bytes / GB if self.graphs else 0.0,
            "startup_cuda_graph_time_seconds": self.graphs.took_s if self.graphs else 0.0,
            f'kernel_set{{set="{self.kernels}"}}': 1.0,
            f'kv_cache_format{{format="{self.runner.state.kv}"}}': 1.0,
            f'sampling_set{{set="{self.runner.choices.name}"}}': 1.0,
        }
        masks: Callable[[], dict[str, float]] = dict
        if self.grammars is not None:
            masks = self.grammars.pipeline.figures
        return lambda: {**masks(), **fixed}

    @property
    def graphs(self) -> Graphs | None:
        """What runs the steps that ranks agree to run by a graph; None: all steps run eagerly."""
        return self.runner.path.graphs

    def execute(self, job: RunStep) -> StepDone:
        """Runs one step; on the device thread only. raises PageAccounting where kernels met bad indices"""
        return waited(self.launch(job))

    def launch(self, job: RunStep) -> StepDone | Callable[[], StepDone]:
        """As StepRunner.launch; on the device thread only. raises PageAccounting as `execute`"""
        found = self.runner.launch(job)
        if isinstance(found, StepDone):
            # The results are on the host by now: nothing is waited for.
            self.runner.model.ops.check()
        return found
