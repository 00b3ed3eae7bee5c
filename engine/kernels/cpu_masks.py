"""Grammar masks on the CPU, by the C kernel: a tenth of the time of bits spread to bytes that torch fills."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.native import CpuKernels, level, load

WORD = 32


def forbid(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Sets tokens whose bit is 0 to minus infinity, in rows `index` int64 [n] of logits float32 [R, V].

    masks   int32 [n, ceil(V / 32)], bit t % 32 of word t // 32 is token t
    raises  ShapeMismatch where they disagree, ValueError for a row that logits don't have
    """
    rows, vocabulary = logits.shape
    count, words = _checked(logits, index, masks)
    index, masks = index.contiguous(), masks.contiguous()
    addresses = index.data_ptr(), masks.data_ptr()
    kernels().forbid(logits.data_ptr(), logits.stride(0), rows, *addresses, count, words, vocabulary)


def greatest(
    logits: Tensor, index: Tensor | None = None, masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest logit of each row, float32 [R], and the first token that has it, int64 [R]; NaN is largest.

    Rows `index`, ascending, have the tokens of their masks alone, as in `forbid`, and are left as they are; a
    row that allows nothing has minus infinity and token 0. raises as `forbid`
    """
    rows, vocabulary = logits.shape
    best, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    count = words = at = bits = 0
    if index is not None and masks is not None:
        count, words = _checked(logits, index, masks)
        index, masks = index.contiguous(), masks.contiguous()
        at, bits = index.data_ptr(), masks.data_ptr()
    elif logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ShapeMismatch(f"logits are {logits.dtype}, with the strides {logits.stride()}")
    kernels().favour(
        best.data_ptr(), tokens.data_ptr(), logits.data_ptr(), logits.stride(0), rows, at, bits, count, words,
        vocabulary,
    )  # fmt: skip
    return best, tokens


def _checked(logits: Tensor, index: Tensor, masks: Tensor) -> tuple[int, int]:
    """Rows and words of the masks. raises ShapeMismatch"""
    vocabulary = logits.shape[1]
    count, words = masks.shape
    if index.numel() != count or words * WORD < vocabulary:
        raise ShapeMismatch(f"{index.numel()} rows of {vocabulary} tokens have masks {tuple(masks.shape)}")
    kinds = (logits.dtype, index.dtype, masks.dtype)
    if kinds != (torch.float32, torch.int64, torch.int32) or logits.stride(1) != 1:
        raise ShapeMismatch(f"logits, rows and masks are {kinds}, logits with the strides {logits.stride()}")
    return count, words


@cache
def kernels() -> CpuKernels:
    """Those of this processor."""
    return load(level())
