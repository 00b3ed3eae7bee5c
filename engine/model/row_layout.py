"""The FP8 row of a latent: the one place that knows its layout. No tensors here.

A row of nope + r channels is, in this order: nope e4m3 codes, r rotated channels as bfloat16, one e8m0 scale
byte for each 64 codes, zeros up to a multiple of eight bytes. 584 bytes for 448 + 64 channels. Rows stand
behind each other, whatever the page: what copies, gathers or sends rows needs no knowledge of them. (A
planar page, as FlashMLA has it, holds the same bytes; no row of it is one piece.) Rows begin at multiples of
eight bytes, hence the loads of eight. A row of zeros reads as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.errors import ShapeMismatch

LATENT_GROUP = 64
"""Channels that share a scale."""
MAX_EXPONENT = 7
"""Decoding multiplies by 2^(exponent + 120), which must stay a finite bfloat16."""


@dataclass(frozen=True)
class RowLayout:
    """Byte offsets within a row of `nope` coded and `rotary` bfloat16 channels. raises ShapeMismatch."""

    nope: int
    rotary: int

    def __post_init__(self) -> None:
        if self.nope % LATENT_GROUP or self.rotary % 4 or self.nope <= 0:
            raise ShapeMismatch(
                f"{self.nope} coded and {self.rotary} rotated channels: takes multiples of {LATENT_GROUP}, 4"
            )

    @property
    def groups(self) -> int:
        """Scale bytes of a row."""
        return self.nope // LATENT_GROUP

    @property
    def scales_at(self) -> int:
        """First scale byte; the rotated channels end there."""
        return self.nope + 2 * self.rotary

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.scales_at + -(-self.groups // 8) * 8


V4_ROW = RowLayout(448, 64)
"""DeepSeek-V4, Flash and Pro."""


@cache
def layout_of(channels: int, row_bytes: int) -> RowLayout:
    """The layout of rows of so many bytes for latents of so many channels; there is one at most.

    raises  ShapeMismatch
    """
    for nope in range(LATENT_GROUP, channels + 1, LATENT_GROUP):
        if (channels - nope) % 4 == 0:
            layout = RowLayout(nope, channels - nope)
            if layout.row_bytes == row_bytes:
                return layout
    raise ShapeMismatch(f"no FP8 row of {channels} channels has {row_bytes} bytes")
