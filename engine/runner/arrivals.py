"""Results on their way to the host, copied on a stream of their own while the next step is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrival:
    """Values that are being copied.

    values  on the host, whole once `wait` has returned
    owned   what is copied; held here, so that no later step gets its memory before it has been read
    ready   None where nothing has to be waited for
    """

    values: tuple[Tensor, ...]
    owned: tuple[Tensor, ...]
    ready: torch.cuda.Event | None

    def wait(self) -> tuple[Tensor, ...]:
        """The values. Waits for their copy, not for what was launched behind it; holds no lock meanwhile."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


class Arrivals:
    """Brings tensors of one device to the host. Calls come from the thread that launches steps."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None

    def bring(self, tensors: Sequence[Tensor]) -> Arrival:
        """Their values behind all that was launched so far; never waits.

        Of a tensor that later steps write, too, it may be what those wrote. The memory that takes
        them is pinned, and its allocator's: it is reused once an event says so.
        """
        owned = tuple(tensors)
        if self._stream is None:
            return Arrival(tuple(tensor.clone() for tensor in owned), owned, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            values = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in owned)
            for value, tensor in zip(values, owned, strict=True):
                value.copy_(tensor, non_blocking=True)
            ready: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._stream)
        return Arrival(values, owned, ready)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
