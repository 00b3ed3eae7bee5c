"""`python -m engine bench step`: a whole forward at a model's real widths against its floor, by kernel.

Two ranks with half of the routed experts each (or one, with fewer layers), dummy weights in the checkpoint's
own formats, contexts filled with random values instead of prefilled. Decode and verify steps are captured
once and replayed. A rank's floor is the larger of the bytes that the step must read over the read rate that
was measured in the same run, and of its operations over the matrix rates (bench/step_floor.py); a row has the
figures of the rank that took longest. On the CPU the shipped geometry shows that all of it runs; its times
mean nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from bench.step_case import cases
from bench.step_rank import Job, live
from engine.config import NANO, Settings
from engine.errors import EngineError

FLASH = NANO.parent / "flash"
"""The geometry of DeepSeek-V4-Flash with its draft; no weights."""
SILENT_S = 280.0
"""What loading, or one case with its compilations, may take."""


class StepFailed(EngineError):
    """A rank of `bench step` failed or went silent; its own words are in the text."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of every case. raises StepFailed"""
    return measure(job_of(args))


def job_of(args: argparse.Namespace) -> Job:
    """The flags as a job: real widths on devices, the model of --model-path elsewhere."""
    cuda = args.device == "cuda"
    ranks = args.ranks or min(2, torch.cuda.device_count() if cuda else 2)
    dtype = "bfloat16" if cuda or args.kernels == "triton" else "float32"
    settings = Settings(
        model_path=str(FLASH) if cuda and not args.geometry else args.geometry or args.model_path,
        load_format="dummy", device=args.device, dtype=dtype,
        kernels=args.kernels, dp_size=ranks, ep_size=ranks,
    )  # fmt: skip
    if args.quick:
        return Job(settings, args.layers or 4, cases([2], [300], [40]), 3, parity=True)
    made = cases(args.batches, args.contexts, args.chunks)
    return Job(settings, args.layers, made, 20, parity=cuda)


def measure(job: Job) -> dict[str, Any]:
    """Runs the job's ranks to their end. raises StepFailed"""
    # Both ranks are on this host: the loopback interface is there whatever else is.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(job.ranks):
            near, far = context.Pipe()
            process = context.Process(
                target=live, args=(rank, job, f"file://{folder}/meet", far), daemon=True
            )
            process.start()
            far.close()
            ranks.append((near, process))
        try:
            figures: dict[str, Any] = {"ranks": job.ranks, "device": job.settings.device}
            if job.parity:
                figures["parity"] = _hear(ranks, "parity")
                print("parity", figures["parity"], flush=True)
            loaded = _hear(ranks, "loaded")
            figures |= loaded[0]
            figures["rates"] = {
                name: min(told["rates"][name] for told in loaded) for name in loaded[0]["rates"]
            }
            figures["rows"] = []
            for _ in job.cases:
                figures["rows"].append(slowest(_hear(ranks, "row")))
                print(line_of(figures["rows"][-1]), flush=True)
            for _, process in ranks:
                process.join(30)
        finally:
            for _, process in ranks:
                process.kill()
    return figures


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


def _hear(ranks: Sequence[tuple[Connection, Any]], kind: str) -> list[dict[str, Any]]:
    """What each rank tells next. raises StepFailed where one fails, ends or is silent"""
    told: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + SILENT_S
    while len(told) < len(ranks):
        pending = [pipe for rank, (pipe, _) in enumerate(ranks) if rank not in told]
        ready = wait(pending, deadline - time.monotonic())
        if not ready:
            raise StepFailed(f"no rank of {len(ranks)} told {kind} within {SILENT_S} s; {len(told)} had")
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
