"""Functions over memory that never moves: captured once on a device and replayed, on the CPU called again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from engine.errors import DeviceFailed

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE


class Recorded(ABC):
    """What `_step` does; whoever derives from this has what `_now` looks at before it calls `__init__`.

    name  for the error of memory that has moved
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._graph: torch.cuda.CUDAGraph | None = None
        self._addresses = self._now()

    @abstractmethod
    def _now(self) -> tuple[int, ...]:
        """Where the memory lies that is read and written."""

    @abstractmethod
    def _step(self) -> None:
        """Reads and writes that memory; no host read."""

    @torch.inference_mode()
    def record(self, pool: _POOL_HANDLE | None) -> None:
        """Runs once on what the memory holds, which compiles what isn't, and captures on a device.

        pool  of the device's graphs; None on the CPU
        """
        self._step()
        if pool is None:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's among them, may ask the device for events meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph

    def _check(self) -> None:
        """raises  DeviceFailed where the memory has moved"""
        if self._now() != self._addresses:
            raise DeviceFailed(f"{self._name} was recorded over memory that has moved")

    def _again(self) -> None:
        """The step, on what the memory holds now."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def free(self) -> None:
        """Gives the graph back."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
