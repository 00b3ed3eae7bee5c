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

Rows = npt.NDArray[np.int32]
Drafted = npt.NDArray[np.int64]


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

    def words(self, mask_slot: int, rows: int) -> Tensor:
        """The slot's first rows, int32 [rows, words] on the device.

        The device waits for the copy, the host doesn't. Call `read` when all that reads them is queued.
        """
        if not self.cuda:
            return self._host[mask_slot][:rows]
        torch.cuda.current_stream(self.device).wait_event(self._copied[mask_slot])
        return self._own[mask_slot][:rows]

    def read(self, mask_slot: int) -> None:
        """All work that reads the slot is queued."""
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
