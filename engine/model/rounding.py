"""Simulated rounding of cached values, as the released weights were trained with; or none."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.model.config import ModelConfig

KVRounding = Literal["none", "simulated", "fp8"]

_E2M1_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Rounding:
    """mode "none" returns values as they are; the others round them and keep their type.

    simulated  as the released weights were trained with. Latents: channels without rotation in groups of 64
               to FP8 E4M3 with a power-of-two scale. Index queries and keys: an orthonormal Hadamard
               transform, then groups of 32 to FP4 E2M1
    fp8        as FP8 pools give values back, exactly so in float32. Latents: as simulated, and rotated
               channels to bfloat16. Index queries and keys: the transform, then each to FP8 E4M3 with one
               float32 scale

    dtype  the model's: what is written to pools of codes is computed in it
    """

    def __init__(self, config: ModelConfig, mode: KVRounding, dtype: torch.dtype) -> None:
        self.mode, self.nope, self.dtype = mode, config.nope_dim, dtype
        if mode not in ("none", "simulated", "fp8"):
            raise ConfigError(f"kv_rounding {mode!r}; none, simulated and fp8 are known")
        self.simulated = mode != "none"
        if self.simulated:
            check_groups(config)

    def type_in(self, pool: Tensor) -> torch.dtype:
        """The type in which an entry of this pool is computed."""
        return self.dtype if pool.element_size() == 1 else pool.dtype

    def latent(self, x: Tensor) -> Tensor:
        """x [..., D] after rotation; rounded where the mode says so."""
        if not self.simulated:
            return x
        rest = x[..., self.nope :]
        rest = rest.bfloat16().to(x.dtype) if self.mode == "fp8" else rest
        return torch.cat([fp8_rounded(x[..., : self.nope], 64), rest], dim=-1)

    def index(self, x: Tensor) -> Tensor:
        """x [..., Di] after rotation; transformed and rounded where the mode says so."""
        if not self.simulated:
            return x
        if self.mode == "fp8":
            codes, scales = index_codes(x)
            return (codes.float() * scales.unsqueeze(-1)).to(x.dtype)
        return fp4_rounded(transformed(x), 32)


def check_groups(config: ModelConfig) -> None:
    """raises ConfigError where the geometry has no groups of 64 and 32 channels to round"""
    nope, width = config.nope_dim, config.index_head_dim
    if nope % 64 or nope <= 0 or width % 32 or width & (width - 1):
        raise ConfigError(f"rounding needs groups of 64 and 32: {nope} channels, index width {width}")


def transformed(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of x [..., Di]; its type."""
    return (x.float() @ _hadamard_on(x.shape[-1], x.device)).to(x.dtype)


def index_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated index queries or keys x [..., Di], transformed: codes float8_e4m3fn, scales float32 [...]."""
    values = transformed(x).float()
    scales = values.abs().amax(-1).clamp_min(1e-4) / 448
    codes = (values / scales.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scales


@lru_cache
def _hadamard_on(width: int, device: torch.device) -> Tensor:
    return hadamard(width).to(device)


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
