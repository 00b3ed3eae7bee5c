"""RMSNorm and hyper-connections against plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ShapeMismatch
from engine.kernels.triton import mhc, norm, oracle
from engine.kernels.triton.mhc_mix import Result
from engine.model.coded_rows import CodedRows, values_of
from engine.model.ops import TorchOps
from engine.model.weights import MhcWeights
from tests.kernels.triton.cases import DEVICE, distance, seeded

EPS = 1e-6
FP32 = 1e-5
"""Float32 sums in another order."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 4096), (7, 100), (65, 512)])
def test_rms_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, columns, generator=seeded(rows), device=DEVICE).to(dtype)
    weight = torch.rand(columns, generator=seeded(1), device=DEVICE)
    for own in (weight, None):
        out, wanted = norm.rms_norm(x, own, EPS), TorchOps().rms_norm(x, own, EPS)
        assert out.dtype == dtype
        assert distance(out, wanted) < (FP32 if dtype == torch.float32 else 1e-3)


def test_rms_norm_of_heads_and_of_a_part_of_rows() -> None:
    x = torch.randn(3, 5, 64, generator=seeded(0), device=DEVICE)
    assert distance(norm.rms_norm(x, None, EPS), TorchOps().rms_norm(x, None, EPS)) < FP32
    part = x.view(15, 64)[:, 16:48]
    assert distance(norm.rms_norm(part, None, EPS), TorchOps().rms_norm(part, None, EPS)) < FP32


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (1, 1024), (37, 384)])
def test_normalised_rows_come_with_their_codes(rows: int, columns: int) -> None:
    x = torch.randn(rows, 2 * columns, generator=seeded(rows), device=DEVICE).bfloat16()[:, :columns]
    weight = torch.rand(columns, generator=seeded(1), device=DEVICE)
    out = norm.norm_rows(x, weight, EPS)
    assert isinstance(out, CodedRows)
    assert torch.equal(out.values, norm.rms_norm(x, weight, EPS))
    codes, scales = oracle.quantise(out.values)
    assert torch.equal(out.codes.float(), codes.float())
    assert torch.equal(out.scales, scales)
    assert isinstance(norm.norm_rows(x.float(), weight, EPS), torch.Tensor)


def weights(hidden: int) -> MhcWeights:
    generator = seeded(hidden)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    return MhcWeights(drawn(24, 4 * hidden) * hidden**-0.5, drawn(24), drawn(24), drawn(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 256), (19, 72)])
def test_mhc(rows: int, hidden: int, dtype: torch.dtype) -> None:
    own, ops = weights(hidden), TorchOps()
    streams = torch.randn(rows, 4, hidden, generator=seeded(rows), device=DEVICE).to(dtype)
    x, *gates = mhc.mhc_pre(streams, own, 20, EPS, EPS)
    outs, wanted = (values_of(x), *gates), ops.mhc_pre(streams, own, 20, EPS, EPS)
    for out, right, tolerance in zip(
        outs, wanted, (FP32 if dtype == torch.float32 else 4e-3, FP32, FP32), strict=True
    ):
        assert out.shape == right.shape
        assert distance(out, right) < tolerance
    y = torch.randn(rows, hidden, generator=seeded(5), device=DEVICE).to(dtype)
    out, right = mhc.mhc_post(y, streams, *wanted[1:]), ops.mhc_post(y, streams, *wanted[1:])
    assert distance(out, right) < (FP32 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (2, 256), (19, 72), (67, 128)])
def test_from_one_sub_block_to_the_next(rows: int, hidden: int, dtype: torch.dtype) -> None:
    own, ops = weights(hidden), TorchOps()
    streams = torch.randn(rows, 4, hidden, generator=seeded(rows), device=DEVICE).to(dtype)
    y = torch.randn(rows, hidden, generator=seeded(5), device=DEVICE).to(dtype)
    before = ops.mhc_pre(streams, weights(hidden), 20, EPS, EPS)[1:]
    between, x, *gates = mhc.mhc_next(Result(y, *before), streams, own, 20, EPS, EPS)
    near = FP32 if dtype == torch.float32 else 4e-3
    assert not rows or distance(between, ops.mhc_post(y, streams, *before)) < near
    # What it makes of these streams is judged: a rounding that turns in them isn't its fault.
    wanted = ops.mhc_pre(between, own, 20, EPS, EPS)
    for out, right, tolerance in zip((values_of(x), *gates), wanted, (near, FP32, FP32), strict=True):
        assert out.shape == right.shape
        assert distance(out, right) < tolerance
    assert isinstance(x, CodedRows) == (dtype == torch.bfloat16 and hidden % 128 == 0)
    if isinstance(x, CodedRows):
        codes, scales = oracle.quantise(x.values)
        assert torch.equal(x.codes.float(), codes.float())
        assert torch.equal(x.scales, scales)


def test_sinkhorn_ends_on_columns_of_one() -> None:
    streams = torch.randn(6, 4, 64, generator=seeded(0), device=DEVICE)
    comb = mhc.mhc_pre(streams, weights(64), 20, EPS, EPS)[2]
    assert float((comb.sum(1) - 1).abs().max()) < 1e-5
    assert float((comb - comb.transpose(1, 2)).abs().max()) > 1e-2


def test_streams_are_four() -> None:
    with pytest.raises(ShapeMismatch):
        mhc.mhc_pre(torch.zeros(1, 3, 64, device=DEVICE), weights(64), 20, EPS, EPS)
