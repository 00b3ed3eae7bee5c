"""Pools, rotations and closing windows for the checks of compression."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.triton.compress_entry import IndexPool
from engine.model.row_layout import RowLayout
from engine.model.step import C4Entries
from tests.kernels.triton.cases import DEVICE, seeded

KEY_WIDTH, ROTATED, SLOTS, POOL_ROWS = 64, 16, 4, 40
STEP_ROWS = 9


def drawn(seed: int, *shape: int) -> Tensor:
    """Normal values, float32."""
    return torch.randn(*shape, generator=seeded(seed), device=DEVICE)


def ints(*values: int) -> Tensor:
    """An int64 column."""
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def turns_of(seed: int, count: int) -> Tensor:
    """Rotations complex64 [count, 1, ROTATED / 2]."""
    angles = drawn(seed, count, 1, ROTATED // 2) * 9
    return torch.polar(torch.ones_like(angles), angles)


def latent_pool(form: str, width: int) -> Tensor:
    """An empty pool of latents of `width` channels."""
    if form == "coded":
        size = RowLayout(width - ROTATED, ROTATED).row_bytes
        return torch.zeros(POOL_ROWS, size, dtype=torch.uint8, device=DEVICE)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    return torch.zeros(POOL_ROWS, width, dtype=dtype, device=DEVICE)


def index_pool(form: str) -> IndexPool:
    """An empty pool of index keys."""
    dtype = {"coded": torch.float8_e4m3fn, "float32": torch.float32}.get(form, torch.bfloat16)
    values = torch.zeros(POOL_ROWS, KEY_WIDTH, device=DEVICE).to(dtype)
    scales = torch.zeros(POOL_ROWS, device=DEVICE) if form == "coded" else None
    return IndexPool(values, form == "rounded", scales)


def c4_entries(count: int) -> C4Entries:
    """Windows that take any rows of two requests' rings and of the step; one is a request's first."""
    ring_rows = ints(*range(8, 16), *range(24, 32))
    halves = torch.randint(0, 2 * (16 + STEP_ROWS), (count, 8), generator=seeded(count), device=DEVICE)
    bias = torch.zeros(count, 8, 1, device=DEVICE)
    bias[:1, :4] = -torch.inf
    out_rows = 1 + torch.randperm(POOL_ROWS - 1, generator=seeded(count), device=DEVICE)[:count]
    return C4Entries(ring_rows, halves, bias, ints(*range(count)), out_rows)
