"""Number formats against computations that share no code with them: Python integers, structs and loops."""

from __future__ import annotations

import math

import pytest
import torch

from engine.errors import CheckpointError
from engine.model import quant


def decode_fp8_byte(byte: int) -> float:
    """One e4m3fn byte by its definition."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def decode_fp4(nibble: int) -> float:
    """One e2m1 nibble by its definition."""
    sign = -1.0 if nibble & 8 else 1.0
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def test_every_scale_byte_but_nan_decodes_to_its_power_of_two() -> None:
    decoded = quant.decode_e8m0(torch.arange(255, dtype=torch.uint8))
    assert [float(v) for v in decoded] == [2.0 ** (b - 127) for b in range(255)]


def test_scale_byte_255_is_refused_with_its_count() -> None:
    with pytest.raises(CheckpointError, match="1 of 3 e8m0 scales are NaN"):
        quant.decode_e8m0(torch.tensor([3, 255, 7], dtype=torch.uint8))


def test_float_and_raw_byte_views_of_scales_decode_alike() -> None:
    raw = torch.tensor([0, 1, 120, 127, 254], dtype=torch.uint8)
    assert torch.equal(quant.decode_e8m0(raw), quant.decode_e8m0(raw.view(torch.float8_e8m0fnu)))


def test_scale_exponents_survive_encoding_at_both_ends() -> None:
    exponents = torch.tensor([-127, -126, -1, 0, 1, 127], dtype=torch.int32)
    assert torch.equal(quant.decode_e8m0(quant.encode_e8m0(exponents)), quant.power_of_two(exponents))


@pytest.mark.parametrize("shape", [(128, 256), (130, 200), (1, 1), (256, 128)])
def test_fp8_weights_equal_code_times_scale_in_every_block(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8) << 7
    blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    scale = torch.randint(0, 240, blocks, generator=generator, dtype=torch.uint8)
    got = quant.dequantise_fp8_blocks(codes.view(torch.float8_e4m3fn), scale, torch.float32)
    for i in range(0, shape[0], 17):
        for j in range(0, shape[1], 13):
            value = decode_fp8_byte(int(codes[i, j])) * 2.0 ** (int(scale[i // 128, j // 128]) - 127)
            assert float(got[i, j]) == value


def test_fp4_packing_puts_the_even_column_in_the_low_nibble() -> None:
    generator = torch.Generator().manual_seed(2)
    packed = torch.randint(-128, 128, (8, 64), generator=generator, dtype=torch.int8)
    scale = torch.randint(0, 250, (8, 4), generator=generator, dtype=torch.uint8)
    got = quant.dequantise_fp4_groups(packed, scale, torch.float32)
    for i in range(8):
        for c in range(128):
            byte = int(packed[i, c // 2]) & 0xFF
            nibble = byte >> 4 if c % 2 else byte & 15
            assert float(got[i, c]) == decode_fp4(nibble) * 2.0 ** (int(scale[i, c // 32]) - 127)


def test_values_on_the_grid_survive_both_formats_exactly() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (128, 64), generator=generator, dtype=torch.int8)
    scale = torch.randint(110, 130, (128, 4), generator=generator, dtype=torch.uint8)
    weight = quant.dequantise_fp4_groups(codes, scale, torch.float32)
    again = quant.dequantise_fp4_groups(*quant.quantise_fp4_groups(weight), torch.float32)
    assert torch.equal(again, weight)
    fp8 = quant.quantise_fp8_blocks(weight[:, :64])
    once = quant.dequantise_fp8_blocks(*fp8, torch.float32)
    assert torch.equal(quant.dequantise_fp8_blocks(*quant.quantise_fp8_blocks(once), torch.float32), once)


def test_fp8_quantisation_errs_by_at_most_half_a_step() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(4))
    codes, scale = quant.quantise_fp8_blocks(weight)
    error = (quant.dequantise_fp8_blocks(codes, scale, torch.float32) - weight).abs()
    # Normal codes: 2^-4 relative; subnormal codes: half of 2^-9 of the block's scale, 2^-6 here.
    assert bool((error <= weight.abs() * 2.0**-4 + 2.0**-16).all())


def test_e2m1_rounding_takes_the_nearest_value_and_ties_to_the_even_code() -> None:
    for step in range(-700, 701):
        x = step / 100
        candidates = sorted(
            range(8), key=lambda code: (abs(quant.E2M1_VALUES[code] - min(abs(x), 6.0)), code % 2)
        )
        expected = math.copysign(quant.E2M1_VALUES[candidates[0]], x)
        assert float(quant.round_e2m1(torch.tensor(x, dtype=torch.float64))) == expected, x


def test_zero_weights_stay_zero_in_both_formats() -> None:
    zero = torch.zeros(128, 128)
    assert torch.equal(quant.dequantise_fp8_blocks(*quant.quantise_fp8_blocks(zero), torch.float32), zero)
    assert torch.equal(quant.dequantise_fp4_groups(*quant.quantise_fp4_groups(zero), torch.float32), zero)


def test_nan_codes_and_overflowing_scales_are_refused() -> None:
    codes = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[5, 5] = 0x7F
    with pytest.raises(CheckpointError, match="NaN codes"):
        quant.dequantise_fp8_blocks(codes, torch.full((1, 1), 127, dtype=torch.uint8), torch.float32)
    large = torch.full((128, 128), 448.0).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="beyond float32"):
        quant.dequantise_fp8_blocks(large, torch.full((1, 1), 254, dtype=torch.uint8), torch.float32)
