"""Weights that stay as the checkpoint stores them: FP8 in squares of 128, packed FP4 in groups of 32.

They are plain tensors with their scales; kernels that take them are in `engine/kernels`. A scale byte is a
biased exponent (e8m0), see `quant.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.model.quant import FP8_BLOCK, dequantise_fp4_groups, dequantise_fp8_blocks


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
    """Routed experts as `expert_layout` lays them; H and I are multiples of 128.

    w13     uint8 [E, H / 128, 2 I, 64], gate rows first; w2 uint8 [E, I / 128, H, 64]
    s13     uint8 [E, H / 128, 2 I, 4]; s2 uint8 [E, I / 128, H, 4]
    even    all blocks of each row go by the same scale
    raises  ShapeMismatch
    """

    w13: Tensor
    s13: Tensor
    w2: Tensor
    s2: Tensor
    even: bool = False

    def __post_init__(self) -> None:
        blocks, inner = self.hidden // FP8_BLOCK, self.inner // FP8_BLOCK
        wanted = (
            (blocks, 2 * self.inner, FP8_BLOCK // 2),
            (blocks, 2 * self.inner, 4),
            (inner, self.hidden, FP8_BLOCK // 2),
            (inner, self.hidden, 4),
        )
        parts = (self.w13, self.s13, self.w2, self.s2)
        if any(tuple(p.shape[1:]) != w or not p.is_contiguous() for p, w in zip(parts, wanted, strict=True)):
            raise ShapeMismatch(f"experts are {[tuple(p.shape) for p in parts]}")
        if self.hidden % FP8_BLOCK or self.inner % FP8_BLOCK:
            raise ShapeMismatch(f"experts of {self.hidden} x {self.inner}: not in multiples of {FP8_BLOCK}")

    @property
    def count(self) -> int:
        """Experts here."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Channels in and out."""
        return self.w2.shape[2]

    @property
    def inner(self) -> int:
        """Channels between the two products."""
        return self.w13.shape[2] // 2

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
