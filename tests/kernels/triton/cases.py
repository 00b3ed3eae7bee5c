"""Random inputs of the kernels, and where they run."""

from __future__ import annotations

import torch
from torch import Tensor

import tests.kernels.triton.interpreting  # noqa: F401

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed: int) -> torch.Generator:
    """A generator on DEVICE."""
    return torch.Generator(DEVICE).manual_seed(seed)


def values(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal values, a few rows of them a thousand times larger or smaller; bfloat16."""
    drawn = torch.randn(*shape, generator=seeded(seed), device=DEVICE) * scale
    if len(shape) == 2 and shape[0] > 2:
        drawn[1] *= 1e3
        drawn[2] *= 1e-6
    return drawn.bfloat16()


def fp8_weight(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes float8_e4m3fn [rows, columns] and e8m0 scales uint8, neither of them nan."""
    generator = seeded(seed)
    codes = torch.randn(rows, columns, generator=generator, device=DEVICE).clamp(-4, 4) * 60
    blocks = (-(-rows // 128), columns // 128)
    scales = torch.randint(112, 124, blocks, generator=generator, device=DEVICE, dtype=torch.uint8)
    return codes.to(torch.float8_e4m3fn), scales


def fp4_weight(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Of a shape [..., N, C]: packed e2m1 uint8 [..., N, C / 2] and e8m0 scales uint8 [..., N, C / 32]."""
    generator = seeded(seed)
    lead, columns = shape[:-1], shape[-1]
    codes = torch.randint(
        0, 256, (*lead, columns // 2), generator=generator, device=DEVICE, dtype=torch.uint8
    )
    scales = torch.randint(
        114, 122, (*lead, columns // 32), generator=generator, device=DEVICE, dtype=torch.uint8
    )
    return codes, scales


def distance(out: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; infinity where either isn't finite."""
    out, wanted = out.double(), wanted.double()
    if not bool(out.isfinite().all()) or not bool(wanted.isfinite().all()):
        return float("inf")
    return float((out - wanted).norm() / wanted.norm().clamp_min(1e-30))
