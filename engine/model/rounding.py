"""Simulated rounding of cached values, as the released weights were trained with; or none."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig

KVRounding = Literal["none", "simulated"]

_E2M1_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Rounding:
    """mode "none" returns values as they are; "simulated" rounds them and keeps their type.

    Latents: channels without rotation in groups of 64 to FP8 E4M3 with a power-of-two scale.
    Index queries and keys: an orthonormal Hadamard transform, then groups of 32 to FP4 E2M1.
    """

    def __init__(self, config: ModelConfig, mode: KVRounding, device: torch.device) -> None:
        self.simulated, self.nope = mode == "simulated", config.nope_dim
        if mode not in ("none", "simulated"):
            raise ConfigError(f"kv_rounding {mode!r}; none and simulated are known")
        if not self.simulated:
            return
        width = config.index_head_dim
        if self.nope % 64 or width % 32 or width & (width - 1):
            raise ConfigError(
                f"rounding needs groups of 64 and 32: {self.nope} channels, index width {width}"
            )
        self.hadamard = hadamard(width).to(device)

    def latent(self, x: Tensor) -> Tensor:
        """x [..., D] after rotation; rounded where the mode says so."""
        if not self.simulated:
            return x
        return torch.cat([fp8_rounded(x[..., : self.nope], 64), x[..., self.nope :]], dim=-1)

    def index(self, x: Tensor) -> Tensor:
        """x [..., Di] after rotation; transformed and rounded where the mode says so."""
        if not self.simulated:
            return x
        return fp4_rounded((x.float() @ self.hadamard).to(x.dtype), 32)


def hadamard(width: int) -> Tensor:
    """The orthonormal Hadamard matrix [width, width], float32; width is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.mul(matrix, width**-0.5)


def power_of_two_scale(largest: Tensor, top: float) -> Tensor:
    """The least power of two s with largest / s <= top."""
    fraction, exponent = torch.frexp(largest / top)
    return torch.ldexp(torch.ones_like(largest), torch.where(fraction == 0.5, exponent - 1, exponent))


def fp8_rounded(x: Tensor, group: int) -> Tensor:
    """x through FP8 E4M3 and back, a power-of-two scale every `group` channels; x's shape and type."""
    groups = x.float().view(*x.shape[:-1], -1, group)
    scale = power_of_two_scale(groups.abs().amax(-1, keepdim=True).clamp_min(1e-4), 448.0)
    rounded = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return rounded.view(x.shape).to(x.dtype)


def fp4_rounded(x: Tensor, group: int) -> Tensor:
    """x through FP4 E2M1 and back, a power-of-two scale every `group` channels; midpoints go towards zero."""
    groups = x.float().view(*x.shape[:-1], -1, group)
    scale = power_of_two_scale(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126), 6.0)
    steps = torch.tensor(_E2M1_STEPS, device=x.device)
    values = torch.tensor(_E2M1_VALUES, device=x.device)
    scaled = groups / scale
    rounded = values[torch.bucketize(scaled.abs(), steps)] * scaled.sign() * scale
    return rounded.view(x.shape).to(x.dtype)
