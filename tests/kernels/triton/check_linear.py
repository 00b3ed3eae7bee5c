"""Quantising and FP8 products against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton import library, linear, one_row, oracle, quantise
from tests.kernels.triton.cases import DEVICE, distance, fp8_weight, values

BF16 = 4e-3
"""One rounding to bfloat16 (at most 2^-8) of sums whose order differs."""


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (1, 128), (3, 1280), (5, 384)])
def test_quantise(rows: int, columns: int) -> None:
    x = values(rows, rows, columns)
    codes, scales = quantise.quantise(x)
    wanted, wanted_scales = oracle.quantise(x)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_quantise_at_the_edges_of_scales() -> None:
    x = torch.zeros(6, 128, device=DEVICE)
    x[1], x[2, 5], x[3, 127] = 1e-30, 448.0, 448.0 * (1 + 2**-23)
    x[4, 0], x[5] = -1e30, torch.linspace(-448, 448, 128, device=DEVICE)
    codes, scales = quantise.quantise(x)
    wanted, wanted_scales = oracle.quantise(x)
    assert torch.equal(scales, wanted_scales)
    assert scales[2] == 1.0
    assert scales[3] == 2.0
    assert torch.equal(codes.float(), wanted.float())


def test_quantise_words() -> None:
    """Groups of 128 as four of 32 of four words of two halves: halves first, then words, then the 32s."""
    for x in (values(3, 3, 384), values(3, 3, 640)[:, :512]):
        codes, scales = quantise.quantise_words(x)
        wanted, wanted_scales = oracle.quantise(x)
        assert torch.equal(scales, wanted_scales)
        natural = codes.float().reshape(3, -1, 2, 4, 4, 4).permute(0, 1, 4, 3, 2, 5)
        assert torch.equal(natural.flatten(1), wanted.float())


def test_quantise_refuses_ragged_groups() -> None:
    with pytest.raises(ShapeMismatch, match="130"):
        quantise.quantise(torch.zeros(1, 130, device=DEVICE))


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "shape"),
    [
        (0, 128, 128, None),
        (1, 64, 256, None),
        (17, 200, 512, None),
        (3, 130, 640, (16, 64, 4, True)),
        (5, 384, 256, (32, 128, 2, True)),
        (70, 130, 256, (32, 64, 1, False)),
    ],
)
def test_linear(rows: int, outputs: int, columns: int, shape: tuple[int, int, int, bool] | None) -> None:
    x = values(rows, rows, columns)
    weight = linear.Fp8Weight(*fp8_weight(outputs, outputs, columns))
    cut = None if shape is None else linear.LinearShape(*shape, 4, 3)
    out = linear.linear_fp8(x, weight, cut)
    assert out.shape == (rows, outputs)
    assert distance(out, oracle.linear(oracle.rounded(x), weight)) < BF16
    assert distance(linear.linear_bf16(x, weight, cut), oracle.linear(x, weight)) < BF16


@pytest.mark.parametrize(("outputs", "columns", "groups"), [(130, 640, 1), (512, 256, 2), (64, 1152, 1)])
def test_one_row(outputs: int, columns: int, groups: int) -> None:
    x = values(outputs, 1, groups * columns)
    weight = linear.Fp8Weight(*fp8_weight(7, outputs, columns), groups)
    wanted = oracle.linear(oracle.rounded(x), weight)
    assert distance(one_row.one_row(*quantise.quantise(x), weight), wanted) < BF16
    assert distance(one_row.one_row(x, None, weight), oracle.linear(x, weight)) < BF16


@pytest.mark.parametrize("size", [32768, 8192, 1024])
def test_one_row_by_any_number_of_outputs_a_program(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of sizes that fill programs and that don't."""
    monkeypatch.setattr(one_row, "BYTES", size)
    for outputs, columns, groups in ((512, 1024, 2), (130, 640, 1), (64, 8192, 1)):
        x = values(outputs, 1, groups * columns)
        weight = linear.Fp8Weight(*fp8_weight(5, outputs, columns), groups)
        wanted = oracle.linear(oracle.rounded(x), weight)
        assert distance(one_row.one_row(*quantise.quantise(x), weight), wanted) < BF16
        assert distance(one_row.one_row(x, None, weight), oracle.linear(x, weight)) < BF16


@pytest.mark.parametrize("rows", [65, 100])
def test_cuts_of_bfloat16_rows_that_one_program_takes(rows: int) -> None:
    cut = linear.shape_for(rows, 8192, 4096, 132, coded=False)
    assert cut == linear.LinearShape(128, 128, 2, True, 8, 3)
    x, weight = values(rows, rows, 256), linear.Fp8Weight(*fp8_weight(4, 200, 256))
    assert distance(linear.linear_bf16(x, weight, cut), oracle.linear(x, weight)) < BF16


def test_what_the_library_is_given() -> None:
    weight = linear.Fp8Weight(*fp8_weight(9, 384, 640))
    scales = values(3, 70, 5).float()
    turned, wide = library.library_scales(scales, weight)
    assert turned.shape == (5, 72)
    assert torch.equal(turned[:, :70], scales.t())
    assert not turned[:, 70:].any()
    assert wide.shape == (3, 8)
    assert torch.equal(wide[:, :5], torch.exp2(weight.scales.float() - 127))
    assert not wide[:, 5:].any()
    assert torch.equal(library.decoded(weight), weight.values(torch.bfloat16))


@pytest.mark.skipif(DEVICE == "cpu", reason="the library's product is of a device")
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"), [(129, 256, 640), (384, 144, 1024), (1003, 512, 256)]
)
def test_products_by_the_library(rows: int, outputs: int, columns: int) -> None:
    x = values(rows, rows, columns)
    weight = linear.Fp8Weight(*fp8_weight(outputs, outputs, columns))
    codes, scales = quantise.quantise(x)
    assert library.takes(codes, weight)
    out = library.library_coded(codes, scales, weight)
    assert distance(out, oracle.linear(oracle.rounded(x), weight)) < BF16
    x, weight = values(rows, rows, 2 * 256), linear.Fp8Weight(*fp8_weight(4, 2 * 128, 256), 2)
    assert distance(library.library_bf16(x, weight), oracle.linear(x, weight)) < BF16


@pytest.mark.parametrize("rows", [1, 19])
def test_groups(rows: int) -> None:
    x = values(rows, rows, 2 * 256)
    weight = linear.Fp8Weight(*fp8_weight(4, 2 * 128, 256), 2)
    assert distance(linear.linear_fp8(x, weight), oracle.linear(oracle.rounded(x), weight)) < BF16
    assert distance(linear.linear_bf16(x, weight), oracle.linear(x, weight)) < BF16


def test_extreme_scales_and_strided_rows() -> None:
    x = values(1, 4, 512)[:, 128:384]
    codes, scales = fp8_weight(2, 128, 256)
    scales[0] = torch.tensor([0, 160], dtype=torch.uint8, device=DEVICE)
    weight = linear.Fp8Weight(codes, scales)
    assert distance(linear.linear_fp8(x, weight), oracle.linear(oracle.rounded(x), weight)) < BF16


def test_shapes_are_checked() -> None:
    codes, scales = fp8_weight(0, 256, 256)
    with pytest.raises(ShapeMismatch):
        linear.Fp8Weight(codes, scales[:1])
    with pytest.raises(ShapeMismatch):
        linear.Fp8Weight(codes, scales, 4)
    with pytest.raises(ShapeMismatch, match="128"):
        linear.linear_fp8(values(0, 1, 128), linear.Fp8Weight(codes, scales))
    with pytest.raises(ShapeMismatch, match="128"):
        linear.linear_fp8(values(0, 2, 128), linear.Fp8Weight(codes, scales))


@pytest.mark.parametrize(
    ("cuda", "capability", "taken"),
    [("12.9", (9, 0), True), ("13.0", (9, 0), True), ("12.8", (9, 0), False), ("13.0", (10, 0), False)],
)
def test_the_library_is_asked_where_it_has_the_product(
    monkeypatch: pytest.MonkeyPatch, cuda: str, capability: tuple[int, int], taken: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    codes = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float8_e4m3fn)
    assert library.takes(cast(Tensor, codes), linear.Fp8Weight(*fp8_weight(9, 384, 640))) == taken
