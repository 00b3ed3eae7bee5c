"""Two processes that are ranks: each has its part of a model, runs what it is told, and tells the logits."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from engine.fsm.owners import ROOT
from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.messages import RunStep, StepDone
from engine.model.config import ModelConfig
from engine.model.dummy import dummy_weights
from engine.model.groups import ALONE, Groups
from engine.model.invariant import TileOps
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.share import share_of
from engine.runner.collectives import close_groups, open_groups
from engine.runner.step import StepRunner
from tests.golden.driver import Driver

CPU = torch.device("cpu")
RANKS = 2
SILENT_S = 60.0
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "num_experts_per_tok": 3,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 32,
    "num_nextn_predict_layers": 0,
}
OPS: dict[str, type[TorchOps]] = {"native": CpuOps, "plain": TorchOps, "tiles": TileOps}

Groupsizes = Sequence[tuple[int, Sequence[int]]]
"""(slot, new tokens) of each request of a rank's part of a step."""


@dataclass(frozen=True)
class Build:
    """A model: changes of the shipped geometry, kernel set, what of it is split, row invariance."""

    changes: tuple[tuple[str, Any], ...]
    ops: str = "native"
    split_experts: bool = True
    split_head: bool = False
    deterministic: bool = True

    def model(self, groups: Groups) -> DeepseekV4:
        """The part of a rank in these groups; ALONE: the whole model."""
        named = json.loads((ROOT / "tests" / "actors" / "geometry.json").read_text())
        config = ModelConfig.from_dict({**named, **dict(self.changes)})
        own = groups if self.split_experts else Groups(groups.dp, ALONE.ep)
        split = self.split_head and groups.dp.size > 1
        share = share_of(config, own, split_head=split)
        kind = OPS[self.ops]
        return DeepseekV4(
            config,
            dummy_weights(config, torch.float32, CPU, rule=share.rule),
            device="cpu",
            dtype=torch.float32,
            deterministic=self.deterministic,
            kv_rounding="none",
            ops=kind(),
            groups=own,
            split_head=split,
        )


def runner_of(model: DeepseekV4) -> StepRunner:
    """A runner with a small cache."""
    return StepRunner(model, KVState(model.config, 5, 30, 30, CPU, torch.float32), (1,))


class Rank:
    """What lives in a worker: one model with a driver, or with a runner of RunSteps."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def build(self, build: Build) -> None:
        """A new model, its caches empty."""
        self.model = build.model(self.groups)
        self.empty()

    def empty(self) -> None:
        """Empty caches."""
        self.driver, self.runner = Driver(self.model), runner_of(self.model)

    def step(self, parts: Groupsizes, ranks: tuple[tuple[int, int, int], ...], bucket: int) -> list[Any]:
        """Logits of every row of this rank's part."""
        return step(self.driver, parts, ranks, bucket)

    def execute(self, job: RunStep) -> StepDone:
        """A step of a scheduler."""
        return self.runner.execute(job)

    def collective(self, name: str, value: Any) -> Any:
        """A collective of the group by itself."""
        return getattr(self.groups.ep.there, name)(torch.from_numpy(value)).numpy()


def step(
    driver: Driver, parts: Groupsizes, ranks: tuple[tuple[int, int, int], ...] = (), bucket: int = 0
) -> list[Any]:
    """One step; slots that are new are bound. Returns the logits [count, V] of each request."""
    for slot, _ in parts:
        if slot not in driver.lengths:
            driver.bind(slot)
    driver.ranks, driver.bucket = ranks, bucket
    return [logits.numpy() for logits in driver.run(parts)]


def live(rank: int, meet_at: str, pipe: Connection) -> None:
    """A worker's life: commands in, results out, until None comes or one fails."""
    torch.set_num_threads(1)
    groups = open_groups(rank, RANKS, RANKS, CPU, meet_at, SILENT_S)
    worker = Rank(groups)
    while (told := pipe.recv()) is not None:
        try:
            pipe.send(getattr(worker, told[0])(*told[1:]))
        except Exception:
            pipe.send(RuntimeError(traceback.format_exc()))
            break
    close_groups(groups)


class Workers:
    """Both workers, from outside."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        meet_at = f"file://{folder}/ranks"
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            own, far = context.Pipe()
            process = context.Process(target=live, args=(rank, meet_at, far), daemon=True)
            process.start()
            self.pipes.append(own)
            self.processes.append(process)

    def tell(self, rank: int, *told: Any) -> None:
        """A command to one rank; `hear` has its result."""
        self.pipes[rank].send(told)

    def hear(self, rank: int) -> Any:
        """The oldest result. raises RuntimeError with the worker's traceback."""
        if not self.pipes[rank].poll(2 * SILENT_S):
            raise RuntimeError(f"rank {rank} is silent")
        result = self.pipes[rank].recv()
        if isinstance(result, RuntimeError):
            raise result
        return result

    def both(self, *told: Any) -> list[Any]:
        """The same command to both."""
        return self.each([told] * RANKS)

    def each(self, told: Sequence[Any]) -> list[Any]:
        """A command to each, at once."""
        for rank in range(RANKS):
            self.tell(rank, *told[rank])
        return [self.hear(rank) for rank in range(RANKS)]

    def close(self) -> None:
        """Ends both; raises where one didn't end well."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        for process in self.processes:
            process.join(30)
        assert [process.exitcode for process in self.processes] == [0] * RANKS
