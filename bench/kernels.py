"""`python -m engine bench kernels`: each Triton kernel at DeepSeek-V4-Flash's shapes, on an NVIDIA device.

A time is the median over replays of a CUDA graph that runs the kernel on one set of weights after another,
more than the second-level cache holds. Its floor is the larger of bytes over the measured read rate and
operations over the measured matrix rate. Every result is compared with the plain-torch oracle first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernel_attention_cases import attend_cases, rope_cases
from bench.kernel_cases import Case, linear_cases, row_cases
from bench.kernel_index_cases import close_cases, commit_cases, score_cases
from bench.kernel_moe_cases import expert_cases, routing_cases
from bench.kernel_sampling_cases import best_cases, draw_cases, edit_cases, markov_cases
from bench.kernel_verify_cases import verify_cases
from engine.errors import ConfigError

ROWS = (1, 16, 64, 128, 1024)


@dataclass(frozen=True)
class Rates:
    """What the device was measured to do: bytes a second read, operations a second in bf16 and FP8."""

    read: float
    bf16: float
    fp8: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rates and rows. raises ConfigError without a device, and where a kernel differs from its oracle."""
    if not torch.cuda.is_available():
        raise ConfigError("this machine has no NVIDIA device")
    return measure(ROWS[:2] if args.quick else ROWS)


def measure(row_counts: tuple[int, ...]) -> dict[str, Any]:
    """Figures for these numbers of rows."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    rates = measured_rates()
    rows = []
    for make in (
        linear_cases,
        expert_cases,
        routing_cases,
        row_cases,
        rope_cases,
        attend_cases,
        close_cases,
        commit_cases,
        score_cases,
        draw_cases,
        edit_cases,
        best_cases,
        markov_cases,
        verify_cases,
    ):
        for case in make(row_counts):
            rows.append(figures_of(case, rates))
    return {"rates": rates.__dict__, "rows": rows}


def figures_of(case: Case, rates: Rates) -> dict[str, Any]:
    """One row of the figures. raises ConfigError beyond the tolerance."""
    if not case.error <= case.tolerance:
        raise ConfigError(
            f"{case.kernel} {case.shape}: {case.error} from its oracle, beyond {case.tolerance}"
        )
    ms = milliseconds(case.calls)
    floor = 1e3 * max(case.bytes / rates.read, case.operations / getattr(rates, case.rate))
    library = milliseconds(case.library) if case.library else None
    return {
        "kernel": case.kernel, "shape": case.shape, "rows": case.rows, "ms": round(ms, 5),
        "floor_ms": round(floor, 5), "over_floor": round(ms / floor, 2), "bound":
        "bytes" if case.bytes / rates.read > case.operations / getattr(rates, case.rate) else "operations",
        "library": case.library_name if library else None, "library_ms": library and round(library, 5),
        "over_library": library and round(ms / library, 2), "error": case.error,
    }  # fmt: skip


def milliseconds(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median time of one call, the calls following each other in one graph."""
    for call in calls[:2]:
        call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[replays // 2] / len(calls)


def measured_rates() -> Rates:
    """Reading 4 GiB, and square products of random values."""
    big = torch.randn(1 << 30, device="cuda")
    read = 4 * big.numel() / (1e-3 * milliseconds([big.sum] * 2))
    del big
    size = 8192
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    wide = [t.bfloat16() for t in (a, b)]
    bf16 = 2 * size**3 / (1e-3 * milliseconds([lambda: wide[0] @ wide[1]] * 4))
    small = [t.to(torch.float8_e4m3fn) for t in (a, b)]
    one = torch.ones((), device="cuda")
    call = lambda: torch._scaled_mm(small[0], small[1].t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    return Rates(read, bf16, 2 * size**3 / (1e-3 * milliseconds([call] * 4)))
