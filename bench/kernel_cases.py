"""Cases of `bench kernels`: FP8 products, norms, quantising and hyper-connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.triton import linear, mhc, norm, oracle, quantise
from engine.kernels.triton.mhc_mix import Result
from engine.model.coded_rows import values_of
from engine.model.ops import TorchOps
from engine.model.weights import MhcWeights

HIDDEN = 4096
LINEARS = {
    "wq_a+wkv": (1536, 4096, 1), "wq_b": (32768, 1024, 1), "wo_a": (8192, 4096, 8), "wo_b": (4096, 8192, 1),
    "shared_w13": (4096, 4096, 1), "shared_w2": (4096, 2048, 1),
}  # fmt: skip
COLD_BYTES = 256 << 20
"""Weights that a graph goes through before it comes back to the first."""
BF16 = 4e-3
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    calls     the same work on several sets of weights
    library   the same work by a library, or nothing
    error     distance of the result from the oracle's, and what it may be
    """

    kernel: str
    shape: str
    rows: int
    calls: list[Callable[[], object]]
    bytes: float
    operations: float
    rate: str
    library_name: str
    library: list[Callable[[], object]]
    error: float
    tolerance: float


def distance(out: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm; infinity for values that aren't finite."""
    out, wanted = out.double(), wanted.double()
    if not bool(out.isfinite().all()) or not bool(wanted.isfinite().all()):
        return float("inf")
    return float((out - wanted).norm() / wanted.norm())


def copies(size: float, at_least: int = 2, at_most: int = 64) -> int:
    """Sets of weights of `size` bytes that the caches don't hold."""
    return max(at_least, min(at_most, round(COLD_BYTES / size)))


def activations(rows: int, columns: int) -> Tensor:
    """Random bfloat16 [rows, columns]."""
    return torch.randn(rows, columns, device="cuda").bfloat16()


def fp8_weight(outputs: int, columns: int, groups: int) -> linear.Fp8Weight:
    """Random FP8 weight."""
    codes = (torch.randn(outputs, columns, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.randint(112, 120, (outputs // 128, columns // 128), device="cuda", dtype=torch.uint8)
    return linear.Fp8Weight(codes, scales, groups)


def scaled_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x times weight transposed by the library, in FP8 with a scale of one for everything; bfloat16."""
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)


def linear_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """FP8 products with quantising, and the same on a library in FP8 with one scale, and in bfloat16."""
    for name, (outputs, columns, groups) in LINEARS.items():
        weights = [fp8_weight(outputs, columns, groups) for _ in range(copies(outputs * columns))]
        wide = [w.codes.bfloat16().view(groups, -1, columns) for w in weights]
        for rows in row_counts:
            yield from _products(name, rows, weights, wide)


def _products(name: str, rows: int, weights: list[linear.Fp8Weight], wide: list[Tensor]) -> Iterator[Case]:
    """One product with `rows` rows. wide: the weights' codes, bfloat16 [groups, outputs / groups, columns]"""
    outputs, columns, groups = LINEARS[name]
    x = activations(rows, groups * columns)
    out = linear.linear_fp8(x, weights[0])
    error = distance(out, oracle.linear(oracle.rounded(x), weights[0]))
    size = outputs * columns + 2 * rows * (groups * columns + outputs)
    operations = 2.0 * rows * outputs * columns
    calls = [lambda w=w: linear.linear_fp8(x, w) for w in weights]
    library_name, library = _library_products(x, weights, wide)
    shape = f"[{rows}, {columns}] x [{outputs}, {columns}]" + (f" / {groups}" if groups > 1 else "")
    yield Case(
        f"linear_fp8 {name}", shape, rows, calls, size, operations, "fp8", library_name, library, error, BF16
    )  # fmt: skip
    if groups > 1:
        error = distance(linear.linear_bf16(x, weights[0]), oracle.linear(x, weights[0]))
        calls = [lambda w=w: linear.linear_bf16(x, w) for w in weights]
        yield Case(
            f"linear_bf16 {name}", shape, rows, calls, size, operations, "bf16", library_name,
            library, error, BF16,
        )  # fmt: skip


def _library_products(
    x: Tensor, weights: list[linear.Fp8Weight], wide: list[Tensor]
) -> tuple[str, list[Callable[[], object]]]:
    """(name, calls) of the library's product for the same work."""
    rows, (groups, _, columns) = x.shape[0], wide[0].shape
    if groups > 1:
        parts = x.view(rows, groups, columns).transpose(0, 1)
        return "torch.bmm bf16", [lambda w=w: torch.bmm(parts, w.transpose(1, 2)) for w in wide]
    if rows % 16 == 0:
        codes = quantise.quantise(x)[0]
        return "torch._scaled_mm, one scale", [lambda w=w: scaled_mm(codes, w.codes) for w in weights]
    return "torch.mm bf16", [lambda w=w: x @ w[0].t() for w in wide]


def row_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """RMSNorm, quantising and hyper-connections."""
    weight = torch.rand(HIDDEN, device="cuda")
    own = MhcWeights(
        torch.randn(24, 4 * HIDDEN, device="cuda") * HIDDEN**-0.5, torch.randn(24, device="cuda"),
        torch.randn(24, device="cuda"), weight,
    )  # fmt: skip
    for rows in row_counts:
        sets = [
            torch.randn(rows, 4, HIDDEN, device="cuda").bfloat16()
            for _ in range(copies(8 * rows * HIDDEN, 4, 16))
        ]
        yield from _norms([streams[:, 0].contiguous() for streams in sets], weight)
        yield from _hyper_connections(sets, own)


def _norms(xs: list[Tensor], weight: Tensor) -> Iterator[Case]:
    """RMSNorm and quantising of bfloat16 [rows, HIDDEN]."""
    x, rows = xs[0], xs[0].shape[0]
    wide, shape = 2.0 * rows * HIDDEN, f"[{rows}, {HIDDEN}]"
    calls = [lambda x=x: norm.rms_norm(x, weight, EPS) for x in xs]
    library = [lambda x=x: F.rms_norm(x, (HIDDEN,), weight.bfloat16(), EPS) for x in xs]
    error = distance(norm.rms_norm(x, weight, EPS), TorchOps().rms_norm(x, weight, EPS))
    yield Case("rms_norm", shape, rows, calls, 2 * wide, 0, "bf16", "F.rms_norm", library, error, 1e-3)
    error = distance(quantise.quantise(x)[0].float(), oracle.quantise(x)[0].float())
    calls = [lambda x=x: quantise.quantise(x) for x in xs]
    yield Case("quantise", shape, rows, calls, 1.5 * wide, 0, "bf16", "", [], error, 0.0)


def _hyper_connections(sets: list[Tensor], own: MhcWeights) -> Iterator[Case]:
    """Both halves of a hyper-connection. sets: streams, bfloat16 [rows, 4, HIDDEN]"""
    ops, streams, rows = TorchOps(), sets[0], sets[0].shape[0]
    wide, shape = 2.0 * rows * HIDDEN, f"[{rows}, 4, {HIDDEN}]"
    pre, right = mhc.mhc_pre(streams, own, 20, EPS, EPS), ops.mhc_pre(streams, own, 20, EPS, EPS)
    error = distance(values_of(pre[0]), right[0]) + 100 * max(map(distance, pre[1:], right[1:]))
    calls = [lambda s=s: mhc.mhc_pre(s, own, 20, EPS, EPS) for s in sets]
    library = [lambda s=s: ops.mhc_pre(s, own, 20, EPS, EPS) for s in sets]
    size = 5 * wide + 4 * own.fn.numel()
    yield Case("mhc_pre", shape, rows, calls, size, 0, "bf16", "torch", library, error, BF16)
    xs = [streams[:, 0].contiguous() for streams in sets]
    pairs = list(zip(xs, sets, strict=True))
    error = distance(mhc.mhc_post(*pairs[0], *right[1:]), ops.mhc_post(*pairs[0], *right[1:]))
    calls = [lambda x=x, s=s: mhc.mhc_post(x, s, *right[1:]) for x, s in pairs]
    library = [lambda x=x, s=s: ops.mhc_post(x, s, *right[1:]) for x, s in pairs]
    yield Case("mhc_post", shape, rows, calls, 9 * wide, 0, "bf16", "torch", library, error, BF16)
    between, x, *gates = mhc.mhc_next(Result(xs[0], *right[1:]), streams, own, 20, EPS, EPS)
    wanted = ops.mhc_pre(between, own, 20, EPS, EPS)
    error = distance(values_of(x), wanted[0]) + 100 * max(map(distance, gates, wanted[1:]))
    calls = [lambda x=x, s=s: mhc.mhc_next(Result(x, *right[1:]), s, own, 20, EPS, EPS) for x, s in pairs]
    library = [lambda x=x, s=s: ops.mhc_next(x, s, *right[1:], own, 20, EPS, EPS) for x, s in pairs]
    size = 14.5 * wide + 4 * own.fn.numel()
    yield Case("mhc_next", shape, rows, calls, size, 0, "bf16", "torch", library, error, BF16)
