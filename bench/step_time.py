"""How a step is run, timed and taken apart: captured or eager, by events, by the profiler's kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.model.expert_weights import ExpertWeights, MoeWeights
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.parallel import ExpertRows

KERNELS_SHOWN = 24

PARTS = {
    "experts": (
        "_route", "_count", "_sort", "_sort_scales", "_quantise_words", "_clear", "_gate_up", "_code",
        "_down", "_combine", "_join",
    ),
    "dense products": (
        "_linear", "_linear_row", "_sum", "_quantise", "_swiglu", "_library_scales", "_decode_weight",
        "_project", "_project_row", "_add", "gemm", "cutlass", "nvjet", "cublas",
    ),
    "hyper-connections": ("_mix", "_mix_row", "_enter", "_collapse", "_post"),
    "attention": (
        "_attend", "_attend_coded", "_combine_parts", "_turns", "_rotate", "_store", "_store_and_norm",
        "_rms_norm", "_entry_rows",
    ),
    "compressors": ("_close_c4", "_close_c128", "_commit_c4", "_commit_c128"),
    "indexer": ("_index_scores", "_select", "_round_queries"),
    "between ranks": ("nccl", "_pack", "_unpack", "_push", "_join_home"),
}  # fmt: skip
"""Kernels by what they are for: whole names, or for libraries a part of the name."""


@dataclass(frozen=True)
class Rates:
    """What the device was measured to do: bytes a second read, operations a second in bfloat16 and FP8."""

    read: float
    bf16: float
    fp8: float


class Recorder:
    """Keeps the choices that a rank's experts get, while asked to: one tensor a layer."""

    def __init__(self, model: DeepseekV4) -> None:
        self.kept: list[tuple[Tensor, int]] | None = None
        # All layers share one way to the experts.
        routed = model.layers[0].routed
        routed.run = self._noting(routed.run)  # type: ignore[method-assign]

    def _noting(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(ops: TorchOps, sent: ExpertRows, moe: MoeWeights, limit: float) -> Tensor:
            out = call(ops, sent, moe, limit)
            if self.kept is not None:
                own = moe.routed
                held = own.w13.shape[0] if isinstance(own, ExpertWeights) else own.count
                # A copy: memory that ranks share has the next layer's rows soon.
                self.kept.append((sent.arrived().clone(), held))
            return out

        return noted

    def run(self, step: Callable[[], object]) -> list[tuple[int, int]]:
        """Runs the step; of each layer the distinct experts and the choices among this rank's."""
        self.kept = []
        step()
        kept, self.kept = self.kept, None
        told = []
        for ids, held in kept:
            here = ids[(ids >= 0) & (ids < held)]
            told.append((int(here.unique().numel()), int(here.numel())))
        return told


class Captured:
    """A step as a CUDA graph. Free it before the ranks' groups are closed."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's among them, may ask the device for events meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = step()

    def __call__(self) -> None:
        self.graph.replay()

    def free(self) -> None:
        """Gives the graph and its memory back."""
        self.out = None
        self.graph.reset()


def milliseconds(step: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Time of each of `repeats` runs; on a device they follow each other without a wait by the host."""
    if device.type == "cpu":
        begins = [time.perf_counter()]
        for _ in range(repeats):
            step()
            begins.append(time.perf_counter())
        return [1e3 * (end - begin) for begin, end in pairwise(begins)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(marks)]


def breakdown(step: Callable[[], object]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One step on the device: milliseconds by part, and kernels, the longest first, the rest together."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.current_stream().synchronize()
    rows = [(1e-3 * event.self_device_time_total, event.count, event.key) for event in seen.key_averages()]
    rows = sorted((row for row in rows if row[0] > 0), reverse=True)
    parts = parts_of([(ms, name) for ms, _, name in rows])
    shown, rest = rows[:KERNELS_SHOWN], rows[KERNELS_SHOWN:]
    if rest:
        shown.append((sum(row[0] for row in rest), sum(row[1] for row in rest), f"{len(rest)} others"))
    kernels = [{"kernel": key[:80], "ms": round(ms, 4), "calls": calls} for ms, calls, key in shown]
    return parts, kernels


def parts_of(kernels: list[tuple[float, str]]) -> dict[str, float]:
    """Milliseconds by PARTS, what belongs to none as "other"; kernels: (milliseconds, name)."""
    whole = {name: part for part, names in PARTS.items() for name in names if name.startswith("_")}
    pieces = [(name, part) for part, names in PARTS.items() for name in names if not name.startswith("_")]
    told: dict[str, float] = {}
    for ms, name in kernels:
        library = (part for piece, part in pieces if piece in name.lower())
        part = whole.get(name) or next(library, "other")
        told[part] = told.get(part, 0.0) + ms
    return {part: round(ms, 4) for part, ms in sorted(told.items(), key=lambda item: -item[1])}


def measured_rates(device: torch.device) -> Rates:
    """Of this rank's device, now."""
    if device.type == "cuda":
        from bench.kernels import measured_rates as of_device

        found = of_device()
        torch.cuda.empty_cache()
        return Rates(found.read, found.bf16, found.fp8)
    big, square = torch.randn(1 << 22), torch.randn(256, 256)
    read = 4 * big.numel() / (1e-3 * min(milliseconds(big.sum, 3, device)))
    product = 2 * 256**3 / (1e-3 * min(milliseconds(lambda: square @ square, 3, device)))
    return Rates(read, product, product)
