"""Recorded steps by the kernel set: those of eager steps, and on a device a replay has the bits of a run.

As a program (`python -m tests.kernels.triton.check_graphs`) it shows all of it in parts: see graph_parts.py.
"""

from __future__ import annotations

import sys
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from bench.step_case import fill
from engine.cache_sizes import CacheSizes
from engine.config import Settings
from engine.kernels.triton_ops import TritonOps
from engine.largest_steps import LargestSteps, admitted, measured
from engine.memory.pools import KVState
from engine.messages import RunStep, Sampling, SlotBind
from engine.model.config import KVFormat, ModelConfig
from engine.model.model import DeepseekV4
from engine.runner.batch import ForwardBatch, build_batch
from engine.runner.forward import commit_step, forward
from engine.runner.graph_layout import GraphKey
from engine.runner.graph_path import TargetPath
from engine.runner.graph_rows import pack
from engine.runner.graphs import Buffers, Graphs, RecordedStep
from engine.runner.plan import PlannedStep, plan_batch
from engine.runner.step import StepRunner, waited
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.check_ops import FIELDS, model, state
from tests.kernels.triton.graph_parts import main

KEY = GraphKey(tokens=3, slots=2, pages=1, width=2)
CONFIG = ModelConfig.from_dict(
    {**FIELDS, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0}
)
"""A layer of each kind of compression."""
STEPS = (((127, 71), (1, 1)),) if DEVICE == "cpu" else (((127, 71), (1, 1)), ((128, 72), (2, 1)))
"""First positions and rows of two requests: interpreted, which is slow, one step that closes both windows."""


def filled(kv: KVFormat) -> KVState:
    """Random caches, the same each time."""
    made = state(CONFIG, kv)
    fill(made, torch.Generator(DEVICE).manual_seed(1))
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


@pytest.mark.parametrize("kv", ["fp8"] if DEVICE == "cpu" else ["model", "fp8"])
def test_a_recorded_step_is_the_eager_one_and_a_replay_the_run(kv: KVFormat) -> None:
    kernels = model(TritonOps(torch.device(DEVICE)), CONFIG)
    eager, rerun = filled(kv), filled(kv)
    sides = [eager, rerun]
    run = RecordedStep(kernels, rerun, KEY, (), Buffers(kernels, [KEY], 0))
    run.record(None)
    if DEVICE == "cuda":
        sides.append(filled(kv))
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
            own, its = (side.pool(name)[:, spec.page_rows :].view(torch.uint8) for side in (rerun, other))
            assert torch.equal(own, its), name
        assert spec.space == "slot" or not rerun.pool(name)[:, 0].view(torch.uint8).any()
    if DEVICE == "cuda":
        graphs.close()


@pytest.mark.skipif(DEVICE == "cpu", reason="the host waits for nothing where it computes itself")
@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_no_part_of_a_planned_step_waits_for_the_device(kv: KVFormat) -> None:
    """The host reads a step's results, and nothing before them."""
    kernels = model(TritonOps(torch.device(DEVICE)), CONFIG)
    path = TargetPath(kernels, filled(kv))
    path.graphs = Graphs(kernels, path.state, [KEY], (), print)
    for bucket in (0, KEY.tokens):
        # What is compiled at first use may wait.
        for watched in ("default", "error"):
            torch.cuda.set_sync_debug_mode(watched)
            try:
                plan = path.plan(batch(*STEPS[0], bucket), bucket)
                commit_step(kernels, path.state, plan, path.run(plan).pending)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    kernels.ops.check()
    path.graphs.close()


@pytest.mark.skipif(DEVICE == "cpu", reason="shown of all operations in tests/runner/test_overlap.py")
@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_steps_are_launched_without_a_wait_and_give_the_tokens_of_those_waited_for(kv: KVFormat) -> None:
    """A prompt and five tokens, by two runners of one model; the first steps compile, and may wait."""
    kernels = model(TritonOps(torch.device(DEVICE)), CONFIG)
    told: list[list[bytes]] = []
    for overlaps in (False, True):
        runner, open_steps = StepRunner(kernels, state(CONFIG, kv), (1,)), deque[Any]()
        runner.overlaps = overlaps
        told.append([])
        for number in range(6):
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("error" if overlaps and number > 2 else "default")
            try:
                open_steps.append(runner.launch(of_one_request(number)))
            finally:
                if DEVICE == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            while len(open_steps) > overlaps * (number < 5):
                told[-1].append(waited(open_steps.popleft()).token_ids)
    assert told[0] == told[1]
    assert all(told[0])
    kernels.ops.check()


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no allocator that tells what steps take")
@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_the_largest_steps_are_measured_and_then_run_on_the_real_cache(kv: KVFormat) -> None:
    """What a start does, with its kernels' flag of bad indices read behind each step."""
    kernels = model(TritonOps(torch.device(DEVICE)), CONFIG)
    settings = Settings(device="cuda", dtype="bfloat16", max_running_requests=4, chunked_prefill_size=40)
    sizes = CacheSizes(slots=6, full_pages=17, window_pages=17, context_length=2048, bytes=0)
    cache = partial(KVState, CONFIG, device=DEVICE, dtype=kernels.dtype, kv=kv)
    taken = measured(kernels, None, settings, sizes, cache, print)
    assert 0 < taken.decode <= taken.largest < 1 << 30
    runner = StepRunner(kernels, cache(sizes.slots, sizes.full_pages, sizes.window_pages), (1,))
    LargestSteps(runner, admitted(settings, sizes, 0), print).run()


def of_one_request(number: int) -> RunStep:
    """Its prompt of five tokens, then steps whose token the device relays."""

    def column(*numbers: int) -> bytes:
        return np.asarray(numbers, np.int32).tobytes()

    if number == 0:
        bind = SlotBind(1, 1, 7, 0, Sampling(8, temperature=0.0), 5)
        pages, tokens = column(1, 0, 1, 2), column(9, 10, 11, 12, 13)
        return RunStep(0, "extend", column(1), column(1), column(0), column(5), tokens, b"\1", pages, (bind,))
    return RunStep(number, "decode", column(1), column(1), column(number + 4), column(1), column(-1), b"\1")


if __name__ == "__main__":
    sys.exit(main())
