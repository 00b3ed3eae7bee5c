"""FP8 codes of rows that a kernel holds: what products with FP8 weights take, `quantise` spared."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.formats import group_exponent, power_of_two, to_e4m3


@triton.jit
def coded(values, COUNT: tl.constexpr, SIZE: tl.constexpr, FLOOR: tl.constexpr):
    """Codes [COUNT] and scales [COUNT / SIZE], as `quantise` gives them, of values [COUNT] in bfloat16."""
    grouped = tl.reshape(values.to(tl.float32), (COUNT // SIZE, SIZE))
    exponent = group_exponent(tl.maximum(tl.max(tl.abs(grouped), 1), FLOOR))
    return tl.reshape(to_e4m3(grouped, exponent[:, None]), (COUNT,)), power_of_two(exponent)
