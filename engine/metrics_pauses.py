"""How long garbage collection stops this process."""

from __future__ import annotations

import gc
import time

from engine.metrics_buckets import Buckets
from engine.metrics_tables import PAUSE_S


class GcPauses:
    """Pauses since `watch`; every thread of the process waits while one lasts.

    name  of the histogram
    """

    def __init__(self, name: str) -> None:
        self.seconds = Buckets(name, PAUSE_S)
        self._began_s = 0.0

    def watch(self) -> None:
        """From now on every collection is timed. Idempotent."""
        if self._note not in gc.callbacks:
            gc.callbacks.append(self._note)

    def leave(self) -> None:
        """No collection is timed any more. Idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        elif self._began_s:
            self.seconds.observe(time.perf_counter() - self._began_s)
