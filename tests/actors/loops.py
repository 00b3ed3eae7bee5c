"""The event loops that the runtime's tests run on, by name."""

from __future__ import annotations

import pytest

VIRTUAL = "trio in virtual time"
REAL = "asyncio on uvloop"
REAL_TRIO = "trio in real time"
"""For tests with threads, whose work a virtual clock doesn't wait for."""

both_loops = pytest.mark.parametrize("anyio_backend", [VIRTUAL, REAL], indirect=True)
both_real_loops = pytest.mark.parametrize("anyio_backend", [REAL_TRIO, REAL], indirect=True)
