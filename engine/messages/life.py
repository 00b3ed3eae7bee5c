"""How ranks are, and how they and the server end."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.messages.base import Message


class Snapshot(Message, frozen=True):
    """Rank -> api, when idle too: load and life of one rank. `wall_s` is the wall clock at publication."""

    rank: int
    wall_s: float
    state: str
    running: int
    waiting: int
    full_pages_free: int
    full_pages_total: int
    window_pages_free: int
    window_pages_total: int
    counters: dict[str, float] = msgspec.field(default_factory=dict)


class Beat(Message, frozen=True):
    """A rank's sign of life, as it stands in shared memory.

    slot     of the memory              rank, pid   of the process that wrote it
    wall_s   wall clock when it did     torn        it couldn't be read
    step_age_s, step_budget_s    of the step that runs (0: none does), and what a step may take
    done     steps so far               phase       of the rank's end, 0: it serves
    """

    slot: int
    rank: int = -1
    pid: int = 0
    wall_s: float = 0.0
    step_age_s: float = 0.0
    step_budget_s: float = 0.0
    done: int = 0
    phase: int = 0
    torn: bool = False


class Probe(Message, frozen=True):
    """HTTP side -> health: how is the server? `slot` is answered with Vitals.

    wall_s  the wall clock
    beats   signs of life that the asker read, each with the process that should have written it
    pids    process of each rank, as far as it is known
    """

    wall_s: float
    slot: Any = None
    beats: tuple[Beat, ...] = ()
    pids: tuple[tuple[int, int], ...] = ()


class Vitals(Message, frozen=True):
    """Health -> HTTP side, the answer to Probe.

    refused  why requests are refused; empty where they are taken
    ages     (rank, seconds since its newest snapshot) of the ranks that sent one
    stale    one line for each rank without a fresh snapshot
    code     of `refused`: starting, rank_lost, shutting_down; empty where requests are taken
    faults   (rank, missing, duplicate, stale, future or unreadable) of the ranks in `stale`, in its order
    """

    refused: str
    ages: tuple[tuple[int, float], ...] = ()
    stale: tuple[str, ...] = ()
    code: str = ""
    faults: tuple[tuple[int, str], ...] = ()


class Signalled(Message, frozen=True):
    """Launcher -> shutdown coordinator: the operator wants an end; a second hastens, a third kills."""


class RankEnded(Message, frozen=True):
    """Launcher -> shutdown coordinator: a rank's process has ended; all that it sent has arrived before.

    code  exit code; negative: the signal that killed it. 0 alone is a clean end
    """

    rank: int
    code: int


class CoreEnded(Message, frozen=True):
    """Loader -> release: the rank's scheduler has ended; `clean`: all ranks agreed, or nothing was left."""

    clean: bool


class ReleasePart(Message, frozen=True):
    """Release -> parts: let go of it (graphs, caches, groups), or wait for the other ranks (barrier)."""

    part: str


class Released(Message, frozen=True):
    """Parts -> release: it is gone; with a text: it failed."""

    fault: str = ""


class PeersMet(Message, frozen=True):
    """Parts -> release: every other rank is at the barrier, or beyond it, or gone."""


class PhaseBegan(Message, frozen=True):
    """Shutdown coordinator -> launcher: drain, stop, kill or close begins; for log and metrics."""

    phase: str


class KillRanks(Message, frozen=True):
    """Shutdown coordinator -> launcher: end every rank's process that is left, now."""


class CloseServer(Message, frozen=True):
    """Shutdown coordinator -> launcher: let the last answers leave, stop listening, end with `code`."""

    code: int
