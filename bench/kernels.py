"""`python -m engine bench kernels`: each Triton kernel at DeepSeek-V4-Flash's shapes, on an NVIDIA device.

A time is the median over replays of a CUDA graph that runs the kernel on one set of weights after another,
more than the second-level cache holds. Its floor is the larger of bytes over the measured read rate and
operations over the measured matrix rate. Every result is compared with the plain-torch oracle first; one that
differs, a kernel that fails and one that hangs are recorded, and what is left is measured all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.kernel_attention_cases import attend_cases, rope_cases
from bench.kernel_cases import Case, linear_cases, row_cases
from bench.kernel_index_cases import close_cases, commit_cases, score_cases
from bench.kernel_moe_cases import expert_cases, routing_cases
from bench.kernel_sampling_cases import best_cases, draw_cases, edit_cases, markov_cases
from bench.kernel_verify_cases import verify_cases
from bench.parts import Part, failures, run_parts
from engine.errors import ConfigError

ROWS = (1, 16, 64, 128, 1024)
CASES: dict[str, Callable[[tuple[int, ...]], Iterator[Case]]] = {
    "linear": linear_cases, "experts": expert_cases, "routing": routing_cases, "rows": row_cases,
    "rope": rope_cases, "attend": attend_cases, "close": close_cases, "commit": commit_cases,
    "score": score_cases, "draw": draw_cases, "edit": edit_cases, "best": best_cases,
    "markov": markov_cases, "verify": verify_cases,
}  # fmt: skip
RATE_REPLAYS = 30
LIMIT_S = 120.0
"""What one case may take, its compilation included."""


@dataclass(frozen=True)
class Rates:
    """What the device was measured to do: bytes a second read, operations a second in bf16 and FP8."""

    read: float
    bf16: float
    fp8: float


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Rates and rows, and under "failures" what failed, and why. raises ConfigError without a device"""
    if not torch.cuda.is_available():
        raise ConfigError("this machine has no NVIDIA device")
    return measure(ROWS[:2] if args.quick else ROWS, args.within_s)


def measure(
    row_counts: tuple[int, ...], within_s: float, names: Sequence[str] = tuple(CASES)
) -> dict[str, Any]:
    """Figures for these numbers of rows. within_s: as in run_parts"""
    parts = [Part("rates", rates_of_device, (), LIMIT_S)]
    parts += [Part(name, rows_of, (name, row_counts), LIMIT_S) for name in names]
    outcomes = run_parts(parts, within_s=within_s)
    rates = next(iter(outcomes["rates"].results), None)
    rows = [row | over_floor(row, rates) for name in names for row in outcomes[name].results]
    failed = failures(outcomes)
    for row in rows:
        if not row["error"] <= row["tolerance"]:
            failed[f"{row['kernel']} {row['shape']}, {row['rows']} rows"] = (
                f"{row['error']} from its oracle, beyond {row['tolerance']}"
            )
    told = {"rates": None if rates is None else asdict(rates), "rows": rows}
    return told | {"failures": failed} if failed else told


def rates_of_device() -> Iterator[Rates]:
    """A part: the rates."""
    yield measured_rates()


def rows_of(name: str, row_counts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """A part: the rows of these cases."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    for case in CASES[name](row_counts):
        yield figures_of(case)


def figures_of(case: Case) -> dict[str, Any]:
    """One row of the figures, without what the rates say of it. What is wrong is never timed."""
    right = case.error <= case.tolerance
    library, why = None, ""
    if case.library and right:
        try:
            library = milliseconds(case.library)
        except Exception as error:
            # It is there to compare with; the kernel's own time doesn't depend on it.
            why = str(error)
    return {
        "kernel": case.kernel, "shape": case.shape, "rows": case.rows, "error": case.error,
        "tolerance": case.tolerance, "ms": round(milliseconds(case.calls), 5) if right else None,
        "bytes": case.bytes, "operations": case.operations, "rate": case.rate,
        "library": case.library_name if case.library else None, "library_ms": library and round(library, 5),
        **({"library_failed": why} if why else {}),
    }  # fmt: skip


def over_floor(row: dict[str, Any], rates: Rates | None) -> dict[str, Any]:
    """What the measured rates allow, and how far from it the kernel and the library's are."""
    if rates is None or row["ms"] is None:
        return {}
    read, computed = row["bytes"] / rates.read, row["operations"] / getattr(rates, row["rate"])
    floor, library = 1e3 * max(read, computed), row["library_ms"]
    return {
        "floor_ms": round(floor, 5), "over_floor": round(row["ms"] / floor, 2),
        "bound": "bytes" if read > computed else "operations",
        "over_library": library and round(row["ms"] / library, 2),
    }  # fmt: skip


def milliseconds(calls: list[Callable[[], object]], replays: int = 7, best: bool = False) -> float:
    """Median time of one call, or the best, the calls following each other in one graph."""
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
    return sorted(times)[0 if best else replays // 2] / len(calls)


def measured_rates() -> Rates:
    """Square products of random values, then reading 4 GiB. Floors are of the best rates: a device that had
    little to do has low clocks at first.
    """
    size = 8192
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    wide = [t.bfloat16() for t in (a, b)]
    bf16 = milliseconds([lambda: wide[0] @ wide[1]] * 4, RATE_REPLAYS, best=True)
    small = [t.to(torch.float8_e4m3fn) for t in (a, b)]
    one = torch.ones((), device="cuda")
    call = lambda: torch._scaled_mm(small[0], small[1].t(), one, one, out_dtype=torch.bfloat16)  # noqa: E731
    fp8 = milliseconds([call] * 4, RATE_REPLAYS, best=True)
    big = torch.randn(1 << 30, device="cuda")
    read = milliseconds([big.sum] * 2, RATE_REPLAYS, best=True)
    operations = 2e3 * size**3
    return Rates(4e3 * big.numel() / read, operations / bf16, operations / fp8)
