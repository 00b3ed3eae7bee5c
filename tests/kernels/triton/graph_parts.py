"""`python -m tests.kernels.triton.check_graphs`: what must hold of recorded steps, in parts with time-outs.

That steps are the eager ones, that none waits for the device, nor its launch for its results, that two ranks'
collectives are captured, and that all of it ends in order. What was shown is printed last, and what failed;
the exit code is 1 where anything did. Without a device, with TRITON_INTERPRET=1, what can run there runs
interpreted, and the ranks over gloo.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

import torch

from bench.parts import Part, failures, run_parts
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.graph_ranks import RANKS, told_by_ranks

EAGER = "test_a_recorded_step_is_the_eager_one_and_a_replay_the_run"
WITHIN_S = 540.0
"""What a command on a device that is lent for ten minutes may take, with its start and its end."""
WAITS = "test_no_part_of_a_planned_step_waits_for_the_device"
LARGEST = "test_the_largest_steps_are_measured_and_then_run_on_the_real_cache"
OVERLAP = "test_steps_are_launched_without_a_wait_and_give_the_tokens_of_those_waited_for"


def shown(name: str, kv: str) -> Iterator[str]:
    """A part: one test of check_graphs.py, with caches of this format."""
    getattr(importlib.import_module("tests.kernels.triton.check_graphs"), name)(kv)
    yield f"{name.removeprefix('test_').replace('_', ' ')} ({kv} caches)"


def parts() -> list[Part]:
    """Those that this machine can show."""
    made = [Part(f"eager, {kv}", shown, (EAGER, kv), 300.0) for kv in ("model", "fp8")]
    if DEVICE == "cuda":
        made += [Part(f"waits, {kv}", shown, (WAITS, kv), 180.0) for kv in ("model", "fp8")]
        made += [Part(f"overlap, {kv}", shown, (OVERLAP, kv), 180.0) for kv in ("model", "fp8")]
        made += [Part(f"largest, {kv}", shown, (LARGEST, kv), 180.0) for kv in ("model", "fp8")]
    if DEVICE == "cpu" or torch.cuda.device_count() >= RANKS:
        made.append(Part("ranks", told_by_ranks, (DEVICE,), 240.0))
    if DEVICE == "cuda" and torch.cuda.device_count() >= RANKS:
        made.append(Part("ranks, near", told_by_ranks, (DEVICE, True), 240.0))
    return made


def main(made: Sequence[Part] = ()) -> int:
    """Runs the parts. Returns the exit code."""
    made = made or parts()
    outcomes = run_parts(made, within_s=WITHIN_S)
    for name, outcome in outcomes.items():
        for result in outcome.results:
            print(f"shown by {name} on {DEVICE}: {result}")
    if not made[-1].name.startswith("ranks"):
        print(f"not shown: two ranks, which need {RANKS} devices")
    failed = failures(outcomes)
    for name, why in failed.items():
        print(f"failed: {name}: {why}")
    return 1 if failed else 0
