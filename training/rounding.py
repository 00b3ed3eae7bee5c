"""Straight-through rounding: weights take the values that their checkpoint format can hold."""

import torch
from torch import Tensor

from engine.model.quant import FP4_GROUP, FP4_MAX, FP8_BLOCK, FP8_MAX, ceil_log2, power_of_two, round_e2m1

# As in engine.model.quant: an all-zero block must not ask for a scale below float32's normal range.
_SMALLEST = 2.0**-126


def format_of(name: str) -> str:
    """Storage format of a matrix by its training name: "fp4" routed experts, "fp8" dense, else "bf16"."""
    if name.endswith((".ffn.w1", ".ffn.w2", ".ffn.w3")):
        return "fp4"
    last = name.removesuffix(".weight").rsplit(".", 1)[-1]
    dense = last in ("wq_a", "wq_b", "wo_a", "wo_b", "shared_w1", "shared_w2", "shared_w3", "main_proj")
    return "fp8" if dense or name.endswith("attn.wkv.weight") else "bf16"


def rounded(stack: Tensor, kind: str) -> Tensor:
    """The nearest values in format `kind`; float32 [N, m, n] to the same."""
    return {"fp4": round_fp4, "fp8": round_fp8, "bf16": round_bf16}[kind](stack)


def round_bf16(stack: Tensor) -> Tensor:
    """Nearest bf16 values as float32."""
    return stack.to(torch.bfloat16).float()


def round_fp4(stack: Tensor) -> Tensor:
    """e2m1 values with one power of two for 32 columns of a row."""
    groups: Tensor = stack.unflatten(-1, (-1, FP4_GROUP))  # type: ignore[no-untyped-call]
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FP4_MAX * _SMALLEST)
    exponent = ceil_log2(amax / FP4_MAX)
    return (round_e2m1(groups * power_of_two(-exponent)) * power_of_two(exponent)).flatten(-2)


def round_fp8(stack: Tensor) -> Tensor:
    """e4m3 values with one power of two for a 128x128 block."""
    rows, columns = stack.shape[-2] // FP8_BLOCK, stack.shape[-1] // FP8_BLOCK
    blocks = stack.reshape(*stack.shape[:-2], rows, FP8_BLOCK, columns, FP8_BLOCK)
    amax = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(FP8_MAX * _SMALLEST)
    exponent = ceil_log2(amax / FP8_MAX)
    codes = (blocks * power_of_two(-exponent)).to(torch.float8_e4m3fn).float()
    return (codes * power_of_two(exponent)).flatten(-2).flatten(-3, -2)
