"""Weights that stay as the checkpoint stores them: FP8 in squares of 128, packed FP4 in groups of 32.

They are plain tensors with their scales; kernels that take them are in `engine/kernels`. A scale byte is a
biased exponent (e8m0), see `quant.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, ShapeMismatch
from engine.model.quant import FP4_GROUP, FP8_BLOCK, dequantise_fp4_groups, dequantise_fp8_blocks

MAX_SCALE = 160
"""The largest e8m0 byte of an FP4 weight: 2^33. Decoding in registers holds no larger one."""


@dataclass(frozen=True)
class Fp8Weight:
    """codes float8_e4m3fn [N, K] row-major; scales uint8 (e8m0) [ceil(N / 128), K / 128].

    groups  the rows are `groups` equal matrices behind each other, each with channels of its own
    raises  ShapeMismatch where K, or the rows of one group of several, aren't a multiple of 128
    """

    codes: Tensor
    scales: Tensor
    groups: int = 1

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        blocks = (-(-rows // FP8_BLOCK), columns // FP8_BLOCK)
        if columns % FP8_BLOCK or tuple(self.scales.shape) != blocks or rows % self.groups:
            raise ShapeMismatch(f"codes {rows} x {columns}, scales {tuple(self.scales.shape)}")
        if self.groups > 1 and rows // self.groups % FP8_BLOCK:
            raise ShapeMismatch(f"{self.groups} groups of {rows} rows: not in multiples of {FP8_BLOCK}")

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] as a tensor of the values has it."""
        return tuple(self.codes.shape)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Rows start to stop (exclusive) of one matrix, in the same memory. raises ShapeMismatch"""
        if start % FP8_BLOCK or self.groups > 1:
            raise ShapeMismatch(f"rows from {start} on of {self.groups} groups cut a square of {FP8_BLOCK}")
        blocks = slice(start // FP8_BLOCK, -(-stop // FP8_BLOCK))
        return Fp8Weight(self.codes[start:stop], self.scales[blocks])

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] itself. raises CheckpointError"""
        return dequantise_fp8_blocks(self.codes, self.scales, dtype)


@dataclass(frozen=True)
class Fp4Weight:
    """One matrix: codes uint8 [N, K / 2], low nibble first; scales uint8 (e8m0) [N, K / 32]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] as a tensor of the values has it."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def values(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K] itself. raises CheckpointError"""
        return dequantise_fp4_groups(self.codes.view(torch.int8), self.scales, dtype)


@dataclass(frozen=True)
class Fp4Experts:
    """w13 uint8 [E, 2 I, H / 2], gate rows first; w2 uint8 [E, H, I / 2]; e8m0 scales uint8 [..., / 32].

    H and I are multiples of 128.
    raises  ShapeMismatch; CheckpointError for a scale above 2^33, which decoding can't hold
    """

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor

    def __post_init__(self) -> None:
        hidden, inner = self.hidden, self.inner
        wanted = (
            (2 * inner, hidden // 2),
            (2 * inner, hidden // FP4_GROUP),
            (hidden, inner // 2),
            (hidden, inner // FP4_GROUP),
        )
        parts = (self.w13, self.s13, self.w2, self.s2)
        if any(tuple(p.shape[1:]) != w or not p.is_contiguous() for p, w in zip(parts, wanted, strict=True)):
            raise ShapeMismatch(f"experts are {[tuple(p.shape) for p in parts]}")
        if hidden % FP8_BLOCK or inner % FP8_BLOCK:
            raise ShapeMismatch(f"experts of {hidden} x {inner}: not in multiples of {FP8_BLOCK}")
        largest = max((int(scales.max()) for scales in (self.s13, self.s2) if scales.numel()), default=0)
        if largest > MAX_SCALE:
            raise CheckpointError(f"an e8m0 scale of an expert is byte {largest}, above {MAX_SCALE}")

    @property
    def count(self) -> int:
        """Experts here."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Channels in and out."""
        return self.w2.shape[1]

    @property
    def inner(self) -> int:
        """Channels between the two products."""
        return self.w13.shape[1] // 2

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return sum(part.nbytes for part in (self.w13, self.s13, self.w2, self.s2))


Weight = Tensor | Fp8Weight
"""A dense matrix of a layer."""
Stored = Tensor | Fp8Weight | Fp4Weight
"""What a loader gives for one name."""


def joined(parts: Sequence[Weight]) -> Weight:
    """Matrices of equal width behind each other.

    raises  ShapeMismatch where some are quantised and others aren't, or one ends within a square
    """
    if all(isinstance(part, Tensor) for part in parts):
        return torch.cat([plain(part) for part in parts])
    kept = [part for part in parts if isinstance(part, Fp8Weight)]
    if len(kept) < len(parts) or any(part.shape[0] % FP8_BLOCK for part in kept[:-1]):
        shapes = [f"{type(part).__name__} {tuple(part.shape)}" for part in parts]
        raise ShapeMismatch(f"can't be joined: {', '.join(shapes)}")
    return Fp8Weight(torch.cat([part.codes for part in kept]), torch.cat([part.scales for part in kept]))


def rows_of(weight: Weight, start: int, stop: int) -> Weight:
    """Rows start to stop (exclusive) of a matrix, in the same memory. raises ShapeMismatch"""
    return weight.rows(start, stop) if isinstance(weight, Fp8Weight) else weight[start:stop]


def plain(weight: Stored | Fp4Experts) -> Tensor:
    """The same where it is a tensor. raises ShapeMismatch: the kernel set takes no quantised weights"""
    if isinstance(weight, Tensor):
        return weight
    raise ShapeMismatch(f"{type(weight).__name__} for operations that take tensors")
