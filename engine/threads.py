"""How many compute threads a rank's device thread uses on the CPU: measured, since more can be slower.

On machines whose processors are shared, threads that spin at each barrier cost more than they compute. The
environment must say how they wait before torch is imported, hence in the parent of a rank's process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

ROUNDS = 5
WORTH = 0.8
"""More threads must take at most this share of one thread's time; less gain is noise, and costs others."""


def environment(threads: int, ranks: int = 1) -> dict[str, str]:
    """What a rank's process must find in its environment; `threads` 0: its share of what is allowed."""
    count = threads or share(ranks)
    return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(count), "KMP_BLOCKTIME": "0"}


def allowed() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(ranks: int) -> int:
    """Processors for each of so many ranks of this host."""
    return max(1, allowed() // ranks)


def choose_threads(
    wanted: int,
    use: Callable[[int], None],
    work: Callable[[], object],
    say: Callable[[str], None],
    ranks: int = 1,
) -> int:
    """`wanted`, or where that is 0 the faster of one thread and the rank's share; in use when this returns.

    use    sets the number for the calling thread
    work   the load that is measured, of some milliseconds
    ranks  that share this host, and measure at the same time
    """
    if wanted:
        use(wanted)
        return wanted
    taken_s = {count: _fastest_s(count, use, work) for count in sorted({1, share(ranks)})}
    fastest = min(taken_s, key=lambda count: taken_s[count])
    best = fastest if taken_s[fastest] < WORTH * taken_s[1] else 1
    use(best)
    figures = ", ".join(f"{count}: {seconds * 1e3:.1f} ms" for count, seconds in taken_s.items())
    say(f"compute threads: {best} (measured {figures})")
    return best


def _fastest_s(count: int, use: Callable[[int], None], work: Callable[[], object]) -> float:
    use(count)
    work()
    taken_s = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - begin)
    # The slowest but one: on a shared machine a good minimum hides the stalls of spinning threads.
    return sorted(taken_s)[-2]
