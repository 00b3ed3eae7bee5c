"""`python -m engine bench ranks`: two ranks that share the experts against one with all, logit by logit.

Two processes, each with its half of the routed experts of a model with dummy weights: heads and widths of the
real model at a reduced depth on two NVIDIA devices (NCCL), something like the shipped one on the CPU (gloo).
The first process then runs the same parts one after the other, alone on its device. Prompts in chunks of
unequal size, decode steps, and steps in which a rank has no work. No graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ranks_runner import Job, Part, Runner, tokens_of
from engine.errors import EngineError
from engine.model.groups import ALONE, Groups
from engine.runner.collectives import close_groups, open_groups

RANKS = 2
SLOTS = 4
"""Requests of a rank; slot 0 is the sink."""
DECODES = 24
SILENT_S = 40.0

TOLERANCE = {"float32": (100, 1e-3), "bfloat16": (90, 0.1)}
"""Percentile of rows, and the largest difference of a logit in them that products over more rows at once
explain; logits have deviation 1. In bfloat16 such a difference may turn a near-tie of the router."""


class Differs(EngineError):
    """Two ranks gave other logits than one."""


def traffic(quick: bool) -> list[tuple[Part, Part]]:
    """Both ranks' parts of every step."""
    steps: list[tuple[Part, Part]] = [
        ([(1, 300)], []),
        ([(1, 1), (2, 70)], [(1, 130), (2, 9)]),
        ([(2, 1)], [(2, 250), (1, 1)]),
        ([], [(3, 64)]),
        ([(1, 1), (2, 1), (3, 257)], [(1, 1), (2, 1), (3, 1)]),
    ]
    for number in range(DECODES // 4 if quick else DECODES):
        own = [(slot, 1) for slot in range(1, 4)]
        steps.append(([], own[:1]) if number % 6 == 5 else (own, own[: 1 + number % 3]))
    return steps


def together(
    job: Job, groups: Groups, steps: Sequence[tuple[Part, Part]]
) -> tuple[list[torch.Tensor], float]:
    """This rank's logits of every step, on the host, and the median seconds of a decode step."""
    rank, runner = groups.dp.rank, Runner(job, groups, SLOTS)
    kept, seconds = [], []
    for parts in steps:
        counts = [sum(count for _, count in part) for part in parts]
        ranks = tuple((len(part), count, count) for part, count in zip(parts, counts, strict=True))
        tokens = tokens_of(parts[rank], rank * SLOTS, runner.lengths, runner.config)
        begin = time.perf_counter()
        kept.append(runner.step(parts[rank], tokens, ranks))
        if max(count for part in parts for _, count in part) == 1:
            seconds.append(time.perf_counter() - begin)
    return kept, float(np.median(seconds))


def alone(job: Job, steps: Sequence[tuple[Part, Part]]) -> tuple[list[torch.Tensor], float]:
    """One rank's logits of every part, in rank order, and the median seconds of the two of a decode step."""
    runner = Runner(job, ALONE, RANKS * SLOTS)
    kept, seconds = [], []
    for parts in steps:
        begin = time.perf_counter()
        own = []
        for rank, part in enumerate(parts):
            here = [(rank * SLOTS + slot, count) for slot, count in part]
            own.append(runner.step(here, tokens_of(here, 0, runner.lengths, runner.config), ()))
        kept.append(torch.cat(own))
        if max(count for part in parts for _, count in part) == 1:
            seconds.append(time.perf_counter() - begin)
    return kept, float(np.median(seconds))


def live(rank: int, jobs: Sequence[Job], quick: bool, meet_at: str, pipe: Connection) -> None:
    """A rank's process: every job with the other one, the first rank then alone; tells the logits."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    cuda = jobs[0].device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    groups = open_groups(rank, RANKS, RANKS, device, meet_at, SILENT_S)
    try:
        for job in jobs:
            begin = time.perf_counter()
            logits, seconds = together(job, groups, traffic(quick))
            pipe.send([[rows.numpy() for rows in logits], seconds, time.perf_counter() - begin])
            gc.collect()
            if rank == 0:
                logits, seconds = alone(job, traffic(quick))
                pipe.send([[rows.numpy() for rows in logits], seconds])
            gc.collect()
            # The other rank must not wait in a collective for as long as the first one runs alone.
            if pipe.recv() is None:
                return
    finally:
        close_groups(groups)


def compare(two: Sequence[list[Any]], one: list[Any], job: Job) -> dict[str, Any]:
    """Figures of one job. raises Differs beyond the tolerance."""
    differences: list[float] = []
    same: list[bool] = []
    for number, expected in enumerate(one[0]):
        found = np.concatenate([told[0][number] for told in two])
        differences += np.abs(found - expected).max(1).tolist()
        same += (found.argmax(1) == expected.argmax(1)).tolist()
    percentile, tolerance = TOLERANCE[job.dtype]
    judged = float(np.percentile(differences, percentile))
    figures = {
        "max_difference": max(differences),
        "median_difference": float(np.median(differences)),
        "equal_rows": float(np.mean(np.array(differences) == 0.0)),
        "judged_percentile": percentile,
        "judged_difference": judged,
        "tolerance": tolerance,
        "rows": len(differences),
        "same_argmax": float(np.mean(same)),
        "logit_std": float(np.std(one[0][0])),
        "decode_step_ms_two_ranks": round(1e3 * max(told[1] for told in two), 3),
        "decode_step_ms_one_rank": round(1e3 * one[1], 3),
        "seconds_two_ranks": round(max(told[2] for told in two), 1),
    }
    # Not `>`: a difference that is no number is one.
    if not judged <= tolerance:
        raise Differs(f"{job}: {json.dumps(figures)}")
    return figures


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Largest differences of logits by type and split; on two devices, or else on the CPU."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= RANKS
    device, dtypes = ("cuda", ("float32", "bfloat16")) if cuda else ("cpu", ("float32",))
    jobs = [Job(device, dtype, split) for dtype in dtypes for split in (False, True)]
    # Both ranks are on this host: the loopback interface is there whatever else is.
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    figures: dict[str, Any] = {"backend": "nccl" if cuda else "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [start(rank, jobs, args.quick, Path(folder)) for rank in range(RANKS)]
        try:
            for job in jobs:
                two = [_hear(pipe, process) for pipe, process in ranks]
                name = f"{job.dtype}{'_split_head' if job.split_head else ''}"
                figures[name] = compare(two, _hear(*ranks[0]), job)
                print(name, json.dumps(figures[name]), flush=True)
                for pipe, _ in ranks:
                    pipe.send(None if job is jobs[-1] else "next")
            for _, process in ranks:
                process.join(SILENT_S)
        finally:
            for _, process in ranks:
                process.kill()
    codes = [process.exitcode for _, process in ranks]
    if any(codes):
        raise EngineError(f"the ranks' processes ended with {codes}")
    return figures


def start(rank: int, jobs: Sequence[Job], quick: bool, folder: Path) -> tuple[Connection, Any]:
    """A rank's process and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(
        target=live, args=(rank, jobs, quick, f"file://{folder}/meet", far), daemon=True
    )
    process.start()
    far.close()
    return near, process


def _hear(pipe: Connection, process: Any) -> list[Any]:
    """What the process tells next; EngineError where it has ended instead."""
    try:
        told: list[Any] = pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        process.join(SILENT_S)
        raise EngineError(f"a rank's process ended with {process.exitcode}, see its output above") from error
    return told
