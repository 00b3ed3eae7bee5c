"""Number formats of DeepSeek-V4's weights in plain torch: FP8 e4m3 in 128x128 blocks, packed FP4 e2m1 in
groups of 32, and their e8m0 scales.

A scale byte is a biased exponent: byte b stands for 2^(b - 127), 0 for 2^-127 and 255 for NaN, which is
refused. Such bytes are never converted by value: their bits are shifted into a float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import CheckpointError

FP8_MAX = 448.0
FP4_MAX = 6.0
FP8_BLOCK = 128
FP4_GROUP = 32
# An all-zero group must not ask for a scale below float32's normal range.
SCALE_FLOOR_EXPONENT = -126

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Code of a magnitude m, indexed by 2 m; magnitudes that e2m1 lacks never occur after rounding.
_CODE_OF_DOUBLED = (0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7)


def ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer e with 2^e >= x, exactly; int32 of x's shape. x is float32 and positive."""
    mantissa, exponent = torch.frexp(x)
    return exponent - (mantissa == 0.5).to(exponent.dtype)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exactly; exponent is an integer tensor within [-127, 127]."""
    return _bits_of_power(exponent.to(torch.int32) + 127).view(torch.float32)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Scale bytes as float32 powers of two.

    scale   float8_e8m0fnu or uint8, any shape
    raises  CheckpointError where a byte is 255 (NaN)
    """
    raw = scale.view(torch.uint8)
    if raw.numel() and int(raw.max()) == 255:
        raise CheckpointError(f"{int((raw == 255).sum())} of {raw.numel()} e8m0 scales are NaN (byte 255)")
    return _bits_of_power(raw.to(torch.int32)).view(torch.float32)


def encode_e8m0(exponent: Tensor) -> Tensor:
    """float8_e8m0fnu scales 2^exponent; exponent is an integer tensor within [-127, 127]."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _bits_of_power(biased: Tensor) -> Tensor:
    # 2^-127 is below float32's normal range: its bits are a subnormal with the top mantissa bit set.
    return torch.where(biased == 0, 0x00400000, biased << 23)


# ---- FP8 weights ----------------------------------------------------------------------------------


def quantise_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and e8m0 scales of a weight, one scale for each 128x128 block.

    weight   [O, I] floating point; ragged last blocks are allowed
    returns  float8_e4m3fn [O, I], float8_e8m0fnu [ceil(O / 128), ceil(I / 128)]
    """
    rows, columns = weight.shape
    padded = weight.new_zeros(_ceil_to(rows), _ceil_to(columns), dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, padded.shape[1] // FP8_BLOCK, FP8_BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).clamp_min(FP8_MAX * 2.0**SCALE_FLOOR_EXPONENT)
    exponent = ceil_log2(amax / FP8_MAX)
    codes = (blocks * power_of_two(-exponent)[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    codes = codes.to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
    return codes.contiguous(), encode_e8m0(exponent)


def dequantise_fp8_blocks(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight in `dtype` from FP8 codes [O, I] and e8m0 scales [ceil(O / 128), ceil(I / 128)].

    raises  CheckpointError for NaN codes or scales, or a product beyond float32
    """
    rows, columns = weight.shape
    if bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError("FP8 weight holds NaN codes")
    factors = decode_e8m0(scale)
    per_row = factors.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return _checked_product(weight.to(torch.float32), per_row, factors, FP8_MAX).to(dtype)


# ---- FP4 weights ----------------------------------------------------------------------------------


def quantise_fp4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Packed e2m1 codes and e8m0 scales of a weight, one scale for 32 columns of a row.

    weight   [O, I] floating point, I a multiple of 32
    returns  int8 [O, I / 2] (low nibble: even column), float8_e8m0fnu [O, I / 32]
    """
    groups = _grouped(weight.to(torch.float32), FP4_GROUP)
    exponent = _fp4_exponent(groups)
    rounded = round_e2m1(groups * power_of_two(-exponent)[..., None])
    codes = torch.tensor(_CODE_OF_DOUBLED, dtype=torch.uint8, device=weight.device)[
        (rounded.abs() * 2).to(torch.int32)
    ]
    # A rounded zero is written as +0: bit pattern 8 exists but means the same.
    codes = torch.where(rounded < 0, codes | 8, codes).flatten(-2)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.view(torch.int8), encode_e8m0(exponent)


def dequantise_fp4_groups(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Weight [O, 2 C] in `dtype` from packed codes int8 [O, C] and e8m0 scales [O, 2 C / 32].

    raises  CheckpointError for NaN scales or a product beyond float32
    """
    values = torch.tensor(E2M1_VALUES, device=packed.device)
    values = torch.cat((values, -values))
    values[8] = 0.0
    byte = torch.arange(256, device=packed.device)
    # One look-up a byte: entry b holds the even and the odd column's value.
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    unpacked = pairs[packed.view(torch.uint8).to(torch.int32)].flatten(-2)
    factors = decode_e8m0(scale)
    groups = _grouped(unpacked, FP4_GROUP)
    return _checked_product(groups, factors[..., None], factors, FP4_MAX).flatten(-2).to(dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """x rounded to the nearest e2m1 value, ties to the even code, saturating at 6; float32 in and out."""
    magnitude = x.abs().clamp_max(FP4_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / step) * step, x)


# ---- shared -----------------------------------------------------------------------------------------


def _fp4_exponent(groups: Tensor) -> Tensor:
    amax = groups.abs().amax(dim=-1).clamp_min(FP4_MAX * 2.0**SCALE_FLOOR_EXPONENT)
    return ceil_log2(amax / FP4_MAX)


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _checked_product(codes: Tensor, factors: Tensor, scales: Tensor, code_max: float) -> Tensor:
    product = codes * factors
    if (
        scales.numel()
        and float(scales.max()) * code_max > torch.finfo(torch.float32).max
        and not bool(product.isfinite().all())
    ):
        raise CheckpointError(f"scale {float(scales.max()):g} makes weights beyond float32")
    return product


def _ceil_to(n: int) -> int:
    return -(-n // FP8_BLOCK) * FP8_BLOCK
