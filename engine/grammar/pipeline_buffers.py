"""Where masks are written and read: two slots that take turns, guarded by the device's events (I5).

On a CUDA device a slot has pinned host memory and memory on the device; copies run on a stream of their own,
so that neither waits for the forward. On the CPU a slot is plain memory, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.actors.round import MASK_SLOTS
from engine.kernels import cpu_masks

Rows = npt.NDArray[np.int32]
Drafted = npt.NDArray[np.int64]

BYTE_BITS = 8


class MaskBuffers:
    """Mask slots and the copy of drafts of one rank.

    rows   most rows that a step masks
    words  32-bit words of a row
    """

    def __init__(self, device: torch.device, rows: int, words: int) -> None:
        self.cuda = device.type == "cuda"
        self.device = device
        shape = (rows, words)
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=self.cuda) for _ in range(MASK_SLOTS)]
        self.host: list[Rows] = [one.numpy() for one in self._host]
        if self.cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._own = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(MASK_SLOTS)]
            self._copied, self._read = ([_event() for _ in range(MASK_SLOTS)] for _ in range(2))

    def send(self, mask_slot: int, rows: int) -> None:
        """Begins to bring the first rows of a slot to the device; called by whoever filled them."""
        if self.cuda:
            with torch.cuda.stream(self._stream):
                self._own[mask_slot][:rows].copy_(self._host[mask_slot][:rows], non_blocking=True)
                self._copied[mask_slot].record(self._stream)

    def apply(self, mask_slot: int, logits: Tensor, index: Tensor) -> None:
        """Rows `index` int64 [n] of logits [R, V], in place, by the slot's first n rows.

        The device's work waits for the copy, the host doesn't.
        """
        own = self._host[mask_slot]
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(self._copied[mask_slot])
            own = self._own[mask_slot]
        forbid(logits, index, own[: index.numel()])
        if self.cuda:
            self._read[mask_slot].record(torch.cuda.current_stream(self.device))

    def wait_read(self, mask_slot: int) -> None:
        """Waits until the device has read the slot."""
        if self.cuda:
            self._read[mask_slot].synchronize()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def fetch(tokens: Tensor) -> Callable[[], Drafted]:
    """Begins to bring `tokens` int64 to the host; the result waits for them, on any thread.

    On a CUDA device the copy stands in the current stream: what follows waits some microseconds for it.
    """
    if tokens.device.type != "cuda":
        return tokens.numpy
    landed = torch.empty(tokens.shape, dtype=torch.int64, pin_memory=True)
    landed.copy_(tokens, non_blocking=True)
    there = _event()
    there.record(torch.cuda.current_stream(tokens.device))

    def wait() -> Drafted:
        there.synchronize()
        return landed.numpy()

    return wait


def forbid(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Sets tokens whose bit is 0 to minus infinity, in rows `index` int64 [n] of logits [R, V].

    index  ascending
    masks  int32 [n, ceil(V / 32)], bit t % 32 of word t // 32 is token t
    """
    if masks.device.type == "cpu":
        cpu_masks.forbid(logits, index, masks)
        return
    # Words are little-endian, so that bit t % 8 of byte t // 8 is token t, too.
    bits = torch.arange(BYTE_BITS, dtype=torch.uint8, device=logits.device)
    banned = ((masks.view(torch.uint8)[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] == 0
    if index.numel() == logits.shape[0]:
        logits.masked_fill_(banned, float("-inf"))
    else:
        own = logits.index_select(0, index).masked_fill_(banned, float("-inf"))
        logits.index_copy_(0, index, own)
