"""Muon for the layers' matrices, AdamW for everything else; float32 masters behind the model's own weights.

Muon, because at this size it needs clearly fewer tokens than AdamW for the same loss and costs under 2 % of a
step: matrices of one shape are stepped as one stack. The update is scaled to AdamW's typical size
(0.2 * sqrt(longer side)), so that one learning rate serves both.

The model holds rounded copies of the masters: bf16 at first, the checkpoint's formats once `quantise` is set.
A gradient taken at the rounded weights and applied to the masters is straight-through rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.geometry import Geometry
from training.model import stays_wide
from training.rounding import format_of, rounded

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-8
WEIGHT_DECAY = 0.1
# Elements: compiled kernels read a parameter in whole 16-byte words only where it starts on one.
ALIGNMENT = 64


def is_muon(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a stack of hidden matrices; embeddings, gates and tables of numbers are not."""
    aside = ("embed.weight", "head.weight", "gate.weight", ".fn", "ape", "weights_proj.weight")
    return parameter.ndim >= 2 and not name.endswith(aside)


def orthogonal(stack: Tensor) -> Tensor:
    """Nearly the orthogonal factor of each matrix of [N, m, n], by five Newton-Schulz steps in bf16."""
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


@dataclass(slots=True)
class Block:
    """Parameters that are stepped together: views of `weights` and `grads` are the model's own tensors."""

    kind: str
    weights: Tensor
    grads: Tensor
    master: Tensor
    first: Tensor
    second: Tensor | None

    def refresh(self, quantise: bool) -> None:
        """Writes the masters into the model, in the checkpoint's format if `quantise`."""
        self.weights.copy_(rounded(self.master, self.kind) if quantise else self.master)


def _padded(vector: Tensor) -> Tensor:
    """A vector with zeros up to a multiple of ALIGNMENT."""
    return F.pad(vector, (0, -vector.shape[0] % ALIGNMENT))


def _block(kind: str, parts: list[tuple[torch.nn.Parameter, Tensor]], adam: bool) -> Block:
    """Moves the parameters into one buffer, each given with its shape inside the block."""
    weights = torch.cat([_padded(values) if adam else values for _, values in parts])
    grads = torch.zeros_like(weights)
    start = 0
    for parameter, values in parts:
        stop = start + values.shape[0]
        parameter.data = weights[start:stop].view(parameter.shape)
        parameter.grad = grads[start:stop].view(parameter.shape)
        start = stop + (-stop % ALIGNMENT if adam else 0)
    master = weights.float().clone()
    second = torch.zeros_like(master) if adam else None
    return Block(kind, weights, grads, master, torch.zeros_like(master), second)


class Trained(Protocol):
    """What an optimizer needs of a model or draft."""

    geometry: Geometry

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter."""


class Optimizer:
    """Owns the model's weight and gradient storage; make it after the model is on its device and typed."""

    def __init__(self, model: Trained) -> None:
        groups: dict[tuple[object, ...], list[tuple[torch.nn.Parameter, Tensor]]] = {}
        for name, parameter in model.named_parameters():
            data = parameter.data
            if not is_muon(name, parameter):
                groups.setdefault(("adam", stays_wide(name, data)), []).append((parameter, data.flatten()))
                continue
            if name.endswith("wo_a.weight"):
                data = data.view(model.geometry.o_groups, -1, data.shape[-1])
            stack = data.view(-1, *data.shape[-2:])
            groups.setdefault((format_of(name), *stack.shape[1:]), []).append((parameter, stack))
        self.blocks = [_block(str(key[0]), parts, key[0] == "adam") for key, parts in groups.items()]
        self.steps = 0

    def zero_grad(self) -> None:
        """Clears the gradient buffers in place; the parameters keep pointing at them."""
        for block in self.blocks:
            block.grads.zero_()

    def average_gradients(self) -> None:
        """Means over all ranks, where there are several."""
        if dist.is_initialized():
            for block in self.blocks:
                dist.all_reduce(block.grads, op=dist.ReduceOp.AVG)

    @torch.no_grad()
    def step(self, rate: float, quantise: bool) -> None:
        """One update of all masters at learning rate `rate`, then of the model."""
        self.steps += 1
        for block in self.blocks:
            if block.second is None:
                self._muon(block, rate)
            else:
                self._adam(block, block.second, rate)
            block.refresh(quantise and block.second is None)

    def _muon(self, block: Block, rate: float) -> None:
        grads = block.grads.float()
        block.first.lerp_(grads, 1 - MOMENTUM)
        update = orthogonal(grads.lerp(block.first, MOMENTUM))
        size = 0.2 * max(block.master.shape[-2:]) ** 0.5
        block.master.mul_(1 - rate * WEIGHT_DECAY).add_(update, alpha=-rate * size)

    def _adam(self, block: Block, second: Tensor, rate: float) -> None:
        grads = block.grads.float()
        block.first.lerp_(grads, 1 - ADAM_BETAS[0])
        second.lerp_(grads.square(), 1 - ADAM_BETAS[1])
        mean = block.first / (1 - ADAM_BETAS[0] ** self.steps)
        spread = (second / (1 - ADAM_BETAS[1] ** self.steps)).sqrt_().add_(ADAM_EPS)
        block.master.addcdiv_(mean, spread, value=-rate)

    def state(self) -> dict[str, object]:
        """Everything a resumed run needs."""
        blocks = [(b.master, b.first, b.second) for b in self.blocks]
        return {"steps": self.steps, "blocks": blocks}

    def load(self, state: dict[str, object], quantise: bool) -> None:
        """Takes a saved state and rewrites the model from its masters."""
        self.steps = state["steps"]  # type: ignore[assignment]
        for block, (master, first, second) in zip(self.blocks, state["blocks"], strict=True):  # type: ignore[call-overload]
            block.master.copy_(master)
            block.first.copy_(first)
            if block.second is not None:
                block.second.copy_(second)
            block.refresh(quantise and block.second is None)
