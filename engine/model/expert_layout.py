"""How experts in packed FP4 lie in memory for products in FP8: their codes and scales, there and back.

Channels go in blocks of 128, each block with all its rows, so that what a program reads at a step lies
together. A row's 64 bytes of a block are sixteen words of eight codes: word 4 t + q holds channels 32 q + 8 t
and the seven after it, so that every fourth word, which is what one lane of the matrix unit takes, has the
same scale. In a word the magnitude of channel i stays at bits 4 i to 4 i + 2, as in a checkpoint; signs of
the first four channels are bits 7, 15, 23 and 31, of the last four bits 3, 11, 19 and 27. Decoding is then
two byte look-ups.

e4m3 holds e2m1 values times 2^-5 to 2^6: a row's four scales of a block are told by their distance from the
row's largest one, or where that is too far, from the largest of the four. Byte q holds in its low half 11
less the distance of scale q; the high halves of bytes 0 and 1 are the low and high half of that largest
scale's byte plus 26. Groups of zeros have any scale. Experts are even where each row goes by its largest one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import CheckpointError, ShapeMismatch
from engine.model.quantised import Fp4Experts, Fp4Weight

BLOCK = 128
MAX_SCALE = 160
"""The largest e8m0 byte of a scale: 2^33. Products in float32 are made for no larger one."""
SCALE_BIAS = 26
"""Added to the byte of a block's largest scale: as a float32's exponent that is 2^32 times the scale of e4m3
codes whose largest scale is 2^6."""
SPAN = 11
"""How many powers of two the scales of a block of one row may lie apart."""


class Laying:
    """Experts of one layer as they come, matrix by matrix.

    raises  ShapeMismatch where hidden or inner isn't a multiple of 128
    """

    def __init__(self, count: int, hidden: int, inner: int, device: torch.device) -> None:
        if hidden % BLOCK or inner % BLOCK:
            raise ShapeMismatch(f"experts of {hidden} x {inner} in FP4: not in multiples of {BLOCK}")

        def empty(rows: int, columns: int, size: int) -> Tensor:
            return torch.empty(count, columns // BLOCK, rows, size, dtype=torch.uint8, device=device)

        self._w13, self._s13 = empty(2 * inner, hidden, BLOCK // 2), empty(2 * inner, hidden, 4)
        self._w2, self._s2 = empty(hidden, inner, BLOCK // 2), empty(hidden, inner, 4)
        self._inner = inner
        self._apart = torch.zeros((), dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.uint8, device=device)
        self._uneven = torch.zeros((), dtype=torch.bool, device=device)

    def put(self, place: int, part: str, weight: Fp4Weight) -> None:
        """Matrix "w1", "w2" or "w3" of expert `place`, to be on this device or moved there."""
        codes, scales = self._w2[place], self._s2[place]
        if part != "w2":
            rows = slice(0, self._inner) if part == "w1" else slice(self._inner, None)
            codes, scales = self._w13[place][:, rows], self._s13[place][:, rows]
        device = codes.device
        weight = Fp4Weight(
            weight.codes.to(device, non_blocking=True), weight.scales.to(device, non_blocking=True)
        )
        used = (weight.codes & 0x77 != 0).view(*weight.scales.shape, 16).any(2)
        own, apart, uneven = lay_scales(weight.scales, used)
        codes.copy_(lay_codes(weight.codes))
        scales.copy_(own)
        torch.maximum(self._apart, apart, out=self._apart)
        self._uneven |= uneven
        torch.maximum(self._largest, weight.scales.max(), out=self._largest)

    def done(self, name: str) -> Fp4Experts:
        """All of them. raises CheckpointError, with `name`, for scales that FP8 products can't hold"""
        apart, largest = int(self._apart), int(self._largest)
        if largest > MAX_SCALE:
            raise CheckpointError(f"an e8m0 scale of {name} is byte {largest}, above {MAX_SCALE}")
        if apart > SPAN:
            raise CheckpointError(
                f"scales of {name} lie 2^{apart} apart within {BLOCK} channels of a row; "
                f"FP8 products of FP4 weights hold at most 2^{SPAN}"
            )
        return Fp4Experts(self._w13, self._s13, self._w2, self._s2, not self._uneven)


def laid_experts(w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor) -> Fp4Experts:
    """Experts from a checkpoint's form, stacked.

    w13     uint8 [E, 2 I, H / 2], gate rows first; w2 uint8 [E, H, I / 2]
    s13     e8m0 as uint8 [E, 2 I, H / 32]; s2 [E, H, I / 32]
    raises  ShapeMismatch; CheckpointError as of `Laying.done`
    """
    count, hidden, inner = w2.shape[0], w2.shape[1], 2 * w2.shape[2]
    if tuple(w13.shape) != (count, 2 * inner, hidden // 2):
        raise ShapeMismatch(f"experts are {tuple(w13.shape)} and {tuple(w2.shape)}")
    layer = Laying(count, hidden, inner, w13.device)
    for place in range(count):
        layer.put(place, "w1", Fp4Weight(w13[place, :inner], s13[place, :inner]))
        layer.put(place, "w3", Fp4Weight(w13[place, inner:], s13[place, inner:]))
        layer.put(place, "w2", Fp4Weight(w2[place], s2[place]))
    return layer.done("experts")


def stored_matrix(codes: Tensor, scales: Tensor) -> Fp4Weight:
    """What `Laying` was given: uint8 [K / 128, N, 64] and [K / 128, N, 4] in a checkpoint's form.

    A group of zeros may come back with another scale.
    """
    blocks, rows = codes.shape[:2]
    words = codes.contiguous().view(torch.int32).view(blocks, rows, 4, 4)
    words = _signs_back(words).permute(1, 0, 3, 2).contiguous()
    low = scales.to(torch.int32)
    largest = (low[..., 0] >> 4 | low[..., 1] & 0xF0) - SCALE_BIAS
    raw = (low & 15) - SPAN + largest.unsqueeze(2)
    raw = raw.clamp_min(0).to(torch.uint8).permute(1, 0, 2).reshape(rows, blocks * 4)
    return Fp4Weight(words.view(torch.uint8).view(rows, blocks * 64), raw)


def lay_codes(codes: Tensor) -> Tensor:
    """uint8 [K / 128, N, 64] of packed codes [N, K / 2]."""
    rows, half = codes.shape
    words = codes.contiguous().view(torch.int32).view(rows, half // 64, 4, 4)
    words = _signs_there(words).permute(1, 0, 3, 2).contiguous()
    return words.view(torch.uint8).view(half // 64, rows, 64)


def lay_scales(scales: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [K / 128, N, 4] of e8m0 scales [N, K / 32]; how far apart those of a block lie, int32 []; and
    whether blocks of a row go by different ones, bool [].

    used  bool [N, K / 32]: groups whose codes aren't all zero
    """
    rows, groups = scales.shape
    blocks, held = (part.reshape(rows, groups // 4, 4) for part in (scales.to(torch.int32), used))
    largest = torch.where(held, blocks, 0).amax(2, keepdim=True)
    of_row = largest.amax(1, keepdim=True)
    even = torch.where(held, of_row - blocks, 0).amax((1, 2), keepdim=True) <= SPAN
    apart = torch.where(held, largest - blocks, 0).max()
    largest = torch.where(even, of_row, largest)
    told = SPAN - torch.where(held, largest - blocks, 0).clamp_max(SPAN)
    biased = largest.squeeze(2) + SCALE_BIAS
    told[..., 0] += (biased & 15) << 4
    told[..., 1] += biased & 0xF0
    return told.to(torch.uint8).transpose(0, 1), apart, ~even.all()


def _signs_there(words: Tensor) -> Tensor:
    """Sign i of eight from bit 4 i + 3 to bit 8 i + 7, and from the fifth on to bit 8 (i - 4) + 3."""
    first, last = _spread(words >> 3 & 0x1111), _spread(words >> 19 & 0x1111)
    return words & 0x77777777 | first << 7 | last << 3


def _signs_back(words: Tensor) -> Tensor:
    first, last = _gathered(words >> 7 & 0x01010101), _gathered(words >> 3 & 0x01010101)
    return words & 0x77777777 | first << 3 | last << 19


def _spread(bits: Tensor) -> Tensor:
    """Bits 0, 4, 8 and 12 to bits 0, 8, 16 and 24."""
    bits = (bits | bits << 8) & 0x00110011
    return (bits | bits << 4) & 0x01010101


def _gathered(bits: Tensor) -> Tensor:
    bits = (bits | bits >> 4) & 0x00110011
    return (bits | bits >> 8) & 0x1111
