"""The KV of a draft model: of each request slot a ring of the last 128 injected rows, and a block's own rows.

Both lie in one flat pool a stage, so that one gather serves a query block: ring row `position mod 128` first,
then `scratch` rows. Scratch rows hold what one draft wrote; the next one overwrites them before it reads.
A key that isn't visible points at a scratch row of its own request: never at a row that nobody wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.step import LayerCache, QueryBlocks, StepRows

RING = 128

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftState:
    """KV of every slot.

    pool     [stages, slots * (128 + scratch), D]
    scratch  rows of a slot beside its ring
    carried  [slots, hc, H] input streams of each slot's last injected row; None where a drafter needs none
    """

    pool: Tensor
    scratch: int
    carried: Tensor | None = None

    @property
    def stride(self) -> int:
        """Pool rows of one slot."""
        return RING + self.scratch

    @property
    def bytes(self) -> int:
        """Of all slots."""
        held = [self.pool] if self.carried is None else [self.pool, self.carried]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def ring_rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Pool rows [n] of positions [n] of slots [n]."""
        return slots * self.stride + positions % RING

    def cache(self, stage: int) -> LayerCache:
        """The pool of one stage as its attention reads it."""
        return LayerCache(self.pool[stage], None, None, None, None, None)


@dataclass(frozen=True)
class BlockPlan:
    """Query rows of a draft: n requests of W rows each, as host columns.

    positions  [n, W]
    written    [n, W] pool rows that receive the rows' own latents
    keys       [n, K] pool rows; seen [n, K] whether the request's rows see them
    """

    positions: Int
    written: Int
    keys: Int
    seen: npt.NDArray[np.bool_]

    @property
    def shape(self) -> BlockShape:
        """Its sizes."""
        requests, width = self.positions.shape
        return BlockShape(requests, width, self.keys.shape[1])

    def packed(self) -> Int:
        """All columns behind each other, as `unpacked` reads them."""
        return np.concatenate([part.ravel() for part in (self.positions, self.written, self.keys, self.seen)])


class BlockShape(NamedTuple):
    """Sizes of a BlockPlan: n requests, W rows of each, K keys."""

    requests: int
    width: int
    keys: int

    @property
    def parts(self) -> list[int]:
        """Numbers of each packed column."""
        rows, keys = self.requests * self.width, self.requests * self.keys
        return [rows, rows, keys, keys]


def unpacked(packed: Tensor, shape: BlockShape, *, single_rows: bool) -> StepRows:
    """A packed plan on its device as layers take it. single_rows: every query gathers for itself.

    Nothing is brought from the host, so that it can be captured.
    """
    positions, written, keys, visible = torch.split(packed, shape.parts)
    blocks, width = shape.requests, shape.width
    keys, visible = keys.view(blocks, -1), visible.view(blocks, -1)
    if single_rows:
        keys, visible = keys.repeat_interleave(width, 0), visible.repeat_interleave(width, 0)
        blocks, width = blocks * width, 1
    bias = torch.zeros(blocks, width, shape.keys, device=packed.device)
    bias.masked_fill_((visible == 0).unsqueeze(1), -torch.inf)
    none, no_bias = keys[:, :0], bias[..., :0]
    block = QueryBlocks(None, width, keys, bias, none, no_bias, none, no_bias)
    total = positions.shape[0]
    return StepRows(positions, written, positions, positions, (block,), None, None, (), None, total, total)


def to_device(column: Int, device: torch.device) -> Tensor:
    """A host column on the device, without waiting for it; on the CPU it shares memory with `column`."""
    tensor = torch.from_numpy(column)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def window_keys(
    first: Int, start: Int, stop: Int, valid_from: Int, window: int
) -> tuple[Int, npt.NDArray[np.bool_]]:
    """Ring rows of the `window` positions from `start` on; all arguments but `window` are [n].

    first    the slots' first pool rows
    stop     positions from here on aren't in the ring
    returns  (rows [n, window], whether the ring holds that position [n, window])
    """
    position = start[:, None] + np.arange(window)
    held = (position >= np.maximum(valid_from, 0)[:, None]) & (position < stop[:, None])
    return first[:, None] + position % RING, held
