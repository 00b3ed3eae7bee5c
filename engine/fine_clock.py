"""The clock of measured times."""

from __future__ import annotations

import asyncio
import time

import anyio


def fine_s() -> float:
    """The loop's clock with all that the system's clock resolves: uvloop's own knows only whole milliseconds.

    Where time is virtual this is virtual time.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.current_time()
    return time.monotonic()
