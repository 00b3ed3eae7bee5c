"""`python -m engine bench step`: a whole forward at a model's real widths against its floor, by kernel.

Two ranks with half of the routed experts each (or one, with fewer layers), dummy weights in the checkpoint's
own formats, contexts filled with random values instead of prefilled. Decode and verify steps are captured
once and replayed. A rank's floor is the larger of the bytes that the step must read over the read rate that
was measured in the same run, and of its operations over the matrix rates (bench/step_floor.py); a row has the
figures of the rank that took longest. What fails or hangs is recorded, and what is left is measured by new
ranks. On the CPU the shipped geometry shows that all of it runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from bench.parts import last_line
from bench.step_case import Case, cases
from bench.step_rank import Job, live
from engine.config import NANO, Settings
from engine.errors import EngineError

FLASH = NANO.parent / "flash"
"""The geometry of DeepSeek-V4-Flash with its draft; no weights."""
LOAD_S = 280.0
"""What comparing, or loading, may take, with all compilations."""
CASE_S = 150.0
"""What one case may take."""


class StepFailed(EngineError):
    """A rank of `bench step` failed or went silent; its own words are in the text."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of every case, and under "failures" what failed, and why."""
    return measure(job_of(args), args.within_s)


def job_of(args: argparse.Namespace) -> Job:
    """The flags as a job: real widths on devices, the model of --model-path elsewhere."""
    cuda = args.device == "cuda"
    ranks = args.ranks or min(2, torch.cuda.device_count() if cuda else 2)
    dtype = "bfloat16" if cuda or args.kernels == "triton" else "float32"
    settings = Settings(
        model_path=str(FLASH) if cuda and not args.geometry else args.geometry or args.model_path,
        load_format="dummy", device=args.device, dtype=dtype,
        kernels=args.kernels, dp_size=ranks, ep_size=ranks, kv_cache_dtype=args.kv_cache_dtype,
    )  # fmt: skip
    if args.quick:
        made = cases([2], [300], [40])
        return Job(settings, args.layers or 4, made, 3, parity=True, collectives=args.collectives)
    made = cases(args.batches, args.contexts, args.chunks)
    return Job(settings, args.layers, made, 20, parity=cuda, collectives=args.collectives)


def measure(job: Job, within_s: float = 0.0) -> dict[str, Any]:
    """Runs the job's ranks to their end; new ones behind whatever fails, as long as something is left.

    within_s  seconds after which nothing begins or goes on; 0: no limit
    """
    # Both ranks are on this host: the loopback interface is there whatever else is.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    figures: dict[str, Any] = {"ranks": job.ranks, "device": job.settings.device, "rows": []}
    failed: dict[str, str] = {}
    session = Session(job, figures, time.monotonic() + within_s if within_s else math.inf)
    while session.left:
        try:
            session.run()
        except StepFailed as error:
            failed[session.doing] = str(error)
            print(f"failed: {session.doing}: {last_line(str(error))}", flush=True)
            if not session.drop():
                break
    return figures | ({"failures": failed} if failed else {})


class Session:
    """The job's parts that are left, and the ranks that run them.

    figures  what they tell is added there
    until    monotonic seconds after which no part begins or goes on
    doing    the part that runs
    """

    def __init__(self, job: Job, figures: dict[str, Any], until: float) -> None:
        self.job, self.figures, self._until = job, figures, until
        self.doing = "start"

    @property
    def left(self) -> bool:
        """Whether anything is."""
        return self.job.parity or bool(self.job.cases)

    def run(self) -> None:
        """Starts the ranks and hears them to their end. raises StepFailed"""
        with tempfile.TemporaryDirectory() as folder:
            ranks = _started(self.job, folder)
            try:
                self._hear(ranks)
                for _, process in ranks:
                    process.join(30)
            finally:
                for _, process in ranks:
                    process.kill()
                    process.join()

    def _hear(self, ranks: Sequence[tuple[Connection, Any]]) -> None:
        if self.job.parity:
            self.doing = "parity"
            self.figures["parity"] = self._told(ranks, "parity", LOAD_S)
            print("parity", self.figures["parity"], flush=True)
            self.job = replace(self.job, parity=False)
        self.doing = "loading"
        loaded = self._told(ranks, "loaded", LOAD_S)
        self.figures |= loaded[0]
        self.figures["rates"] = {
            name: min(told["rates"][name] for told in loaded) for name in loaded[0]["rates"]
        }
        while self.job.cases:
            self.doing = name_of(self.job.cases[0])
            self.figures["rows"].append(slowest(self._told(ranks, "row", CASE_S)))
            print(line_of(self.figures["rows"][-1]), flush=True)
            self.job = replace(self.job, cases=self.job.cases[1:])

    def _told(
        self, ranks: Sequence[tuple[Connection, Any]], kind: str, silent_s: float
    ) -> list[dict[str, Any]]:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise StepFailed(f"not begun, with {len(self.job.cases)} cases left: the time is over")
        return _hear(ranks, kind, min(silent_s, left_s))

    def drop(self) -> bool:
        """Leaves out what failed. False where nothing of the rest can run either."""
        if self.doing == "parity":
            self.job = replace(self.job, parity=False)
        elif self.doing == "loading":
            return False
        else:
            self.job = replace(self.job, cases=self.job.cases[1:])
        return time.monotonic() <= self._until


def _started(job: Job, folder: str) -> list[tuple[Connection, Any]]:
    """A pipe and a process for each rank."""
    context, ranks = multiprocessing.get_context("spawn"), []
    for rank in range(job.ranks):
        near, far = context.Pipe()
        process = context.Process(target=live, args=(rank, job, f"file://{folder}/meet", far), daemon=True)
        process.start()
        far.close()
        ranks.append((near, process))
    return ranks


def name_of(case: Case) -> str:
    """As failures have it."""
    return f"{case.kind} of {case.rows} rows at {case.context}"


def slowest(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the rank that took longest, with every rank's time and distinct experts beside it."""
    if "skipped" in told[0]:
        return told[0]
    row = max(told, key=lambda own: float(own["ms"]))
    return {
        **row,
        "ms_of_ranks": [own["ms"] for own in told],
        "distinct_of_ranks": [own["distinct_experts"] for own in told],
    }


def line_of(row: dict[str, Any]) -> str:
    """One line of progress."""
    if "skipped" in row:
        return f"{row['kind']:8} rows {row['rows_per_rank']:5} context {row['context']:6}: no room"
    return (
        f"{row['kind']:8} rows {row['rows_per_rank']:5} context {row['context']:6} layers {row['layers']:2} "
        f"{'graph' if row['graph'] else 'eager'} {row['ms']:9.3f} ms, floor {row['floor_ms']:9.3f} "
        f"({row['bound']}), ratio {row['ratio']}, {row['distinct_experts']} experts a layer"
    )


def _hear(ranks: Sequence[tuple[Connection, Any]], kind: str, silent_s: float) -> list[dict[str, Any]]:
    """What each rank tells next. raises StepFailed where one fails, ends or is silent"""
    told: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + silent_s
    while len(told) < len(ranks):
        pending = [pipe for rank, (pipe, _) in enumerate(ranks) if rank not in told]
        ready = wait(pending, deadline - time.monotonic())
        if not ready:
            raise StepFailed(f"no rank of {len(ranks)} told {kind} within {silent_s:g} s; {len(told)} had")
        for rank, (pipe, process) in enumerate(ranks):
            if pipe not in ready:
                continue
            try:
                found, value = pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                process.join(5)
                raise StepFailed(f"rank {rank} ended with {process.exitcode}") from error
            if found != kind:
                raise StepFailed(f"rank {rank}: {value}")
            told[rank] = value
    return [told[rank] for rank in range(len(ranks))]
