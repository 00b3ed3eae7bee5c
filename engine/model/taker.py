"""Takes named tensors out of a checkpoint for the layers, checked against the wanted shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.quantised import Fp8Weight, Stored, Weight


class Taker:
    """Takes named tensors out of a checkpoint, checking shapes, and moves them to their device and type.

    keeps  weights stay as they are stored, for a kernel set that takes them so: FP8 and FP4 codes with their
           scales, and in the model's type what is otherwise widened to float32 without a gain
    """

    def __init__(
        self, weights: Mapping[str, Stored], device: torch.device, dtype: torch.dtype, *, keeps: bool = False
    ) -> None:
        self.weights, self.device, self.dtype, self.keeps = weights, device, dtype, keeps

    def stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        """What the checkpoint gives for `name`, whose values are [shape]. raises CheckpointError."""
        if name not in self.weights:
            raise CheckpointError(f"tensor {name!r} is missing")
        found = self.weights[name]
        if tuple(found.shape) != shape:
            raise CheckpointError(f"tensor {name!r} is {tuple(found.shape)}, not {shape}")
        return found

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Tensor `name` as the model's type unless `dtype` is given. raises CheckpointError."""
        found, dtype = self.stored(name, shape), dtype or self.dtype
        if not isinstance(found, Tensor):
            found = found.values(dtype)
        return found.to(self.device, dtype)

    def matrix(self, name: str, shape: tuple[int, ...]) -> Weight:
        """A dense matrix: in FP8 where it is stored so and kept, else as `take`. raises CheckpointError."""
        found = self.stored(name, shape)
        if not (self.keeps and isinstance(found, Fp8Weight)):
            return self.take(name, shape)
        return Fp8Weight(found.codes.to(self.device), found.scales.to(self.device))

    def fp32(self, name: str, *shape: int) -> Tensor:
        """Tensor `name` as float32. raises CheckpointError."""
        return self.take(name, shape, torch.float32)

    def exact(self, name: str, *shape: int) -> Tensor:
        """Tensor `name` for products in float32: in the model's type where weights are kept, else float32.

        The loader has rounded it to the model's type already, so nothing is lost by keeping that.
        """
        return self.take(name, shape) if self.keeps else self.fp32(name, *shape)
