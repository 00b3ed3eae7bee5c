"""Recorded steps by the kernel set: those of eager steps, and on a device a replay has the bits of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from engine.kernels.triton_ops import TritonOps
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import ModelConfig
from engine.model.model import DeepseekV4
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.forward import commit_step, forward
from engine.runner.graph_rows import GraphKey, pack
from engine.runner.graphs import Buffers, Graphs, RecordedStep
from engine.runner.plan import PlannedStep, plan_batch
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.check_ops import FIELDS, model, state

KEY = GraphKey(tokens=3, slots=2, pages=1, width=2)
STEPS = (((127, 71), (1, 1)),) if DEVICE == "cpu" else (((127, 71), (1, 1)), ((128, 72), (2, 1)))
"""First positions and rows of two requests: interpreted, which is slow, one step that closes both windows."""


def filled(config: ModelConfig) -> KVState:
    """Random caches, the same each time."""
    made, draw = state(config), torch.Generator(DEVICE).manual_seed(1)
    for name, spec in made.specs.items():
        if spec.layers:
            made.pool(name).normal_(generator=draw)
            if spec.space != "slot":
                made.pool(name)[:, :1] = 0
    for layer in range(config.num_hidden_layers):
        running = made.layer(layer).c128_state
        if running is not None:
            running[:, 1] = 1.0
    return made


def batch(starts: tuple[int, ...], counts: tuple[int, ...], bucket: int) -> ForwardBatch:
    """Slots 1 and 2, logits of every row."""

    def column(numbers: Any) -> bytes:
        return np.asarray(numbers, np.int32).tobytes()

    step = RunStep(
        1, "decode", column([1, 2]), column([1, 1]), column(starts), column(counts),
        column(range(9, 9 + sum(counts))), b"\1\1", bucket=bucket,
    )  # fmt: skip
    return build_batch(
        step, rank=0, row_tile=1, idle_runs=False, every_logit=True, taps=(), graph_key="", tbo_boundary=-1,
        cp_segments=(),
    )  # fmt: skip


def committed(kernels: DeepseekV4, held: KVState, plan: PlannedStep, out: Any) -> torch.Tensor:
    """Logits of a step whose rows are all committed; what kernels met outside is an error."""
    logits = out.logits.clone()
    commit_step(kernels, held, plan, out.pending)
    kernels.ops.check()
    return logits


def test_a_recorded_step_is_the_eager_one_and_a_replay_the_run() -> None:
    config = ModelConfig.from_dict(
        {**FIELDS, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0}
    )
    kernels = model(TritonOps(torch.device(DEVICE)), config)
    eager, rerun = filled(config), filled(config)
    sides = [eager, rerun]
    run = RecordedStep(kernels, rerun, KEY, (), Buffers(kernels, [KEY], 0))
    run.record(None)
    if DEVICE == "cuda":
        sides.append(filled(config))
        graphs = Graphs(kernels, sides[2], [KEY], (), print)
    for starts, counts in STEPS:
        plain = plan_batch(eager, batch(starts, counts, 0), single_rows=True, ops=kernels.ops)
        wanted = committed(kernels, eager, plain, forward(kernels, eager, plain))
        plan = pack(rerun, batch(starts, counts, KEY.tokens), KEY)
        found = committed(kernels, rerun, plan, run.run(plan))
        if DEVICE == "cpu":
            assert torch.equal(found, wanted)
        # On a device attention is cut by how many columns there are, padded ones too.
        assert torch.cosine_similarity(found, wanted).min() > 0.95
        if DEVICE == "cuda":
            replay = graphs.plan(batch(starts, counts, KEY.tokens))
            assert replay is not None
            assert torch.equal(committed(kernels, sides[2], replay, graphs.run(replay)), found)
    for name, spec in rerun.specs.items():
        for other in sides[2:] or sides[:1]:
            own = rerun.pool(name)[:, spec.page_rows :]
            assert torch.equal(own, other.pool(name)[:, spec.page_rows :]), name
        assert spec.space == "slot" or not rerun.pool(name)[:, 0].any()
    if DEVICE == "cuda":
        graphs.close()
