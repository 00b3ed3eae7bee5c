"""Rotary frequencies and rotations: interleaved pairs on the last channels of a head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.fields import Yarn


def frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Angle per position of each channel pair, [dim / 2] float32; YaRN stretches the slow ones."""
    base = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if yarn is None:
        return base

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns `turns` times within the original context."""
        reach = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(reach) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    # A zero width would divide by zero; the published form widens it by a thousandth.
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return base / yarn.factor * ramp + base * (1 - ramp)


def plain_frequencies(config: ModelConfig) -> Tensor:
    """The table of window-only layers and draft stages."""
    return frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def compressed_frequencies(config: ModelConfig) -> Tensor:
    """The table of c4 and c128 layers: queries, latents, compressed entries and indexer."""
    return frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)


def turns(positions: Tensor, table: Tensor) -> Tensor:
    """Unit complex numbers e^(i angle), [n, 1, dim / 2] complex64, for positions [n] int64."""
    angles = positions.float().unsqueeze(1) * table
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
