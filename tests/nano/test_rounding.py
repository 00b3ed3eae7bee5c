"""Straight-through rounding gives exactly what the checkpoint's formats hold."""

import torch

from engine.model.quant import (
    dequantise_fp4_groups,
    dequantise_fp8_blocks,
    quantise_fp4_groups,
    quantise_fp8_blocks,
)
from training.rounding import round_fp4, round_fp8


def test_rounded_weights_are_what_a_checkpoint_gives_back() -> None:
    """Also after a second rounding: the exported model is the trained one."""
    weights = torch.randn(2, 256, 384, generator=torch.Generator().manual_seed(0)) * 0.05
    for matrix, fp4, fp8 in zip(weights, round_fp4(weights), round_fp8(weights), strict=True):
        for values in (matrix, fp4):
            torch.testing.assert_close(
                dequantise_fp4_groups(*quantise_fp4_groups(values), torch.float32), fp4, atol=0, rtol=0
            )
        for values in (matrix, fp8):
            torch.testing.assert_close(
                dequantise_fp8_blocks(*quantise_fp8_blocks(values), torch.float32), fp8, atol=0, rtol=0
            )
