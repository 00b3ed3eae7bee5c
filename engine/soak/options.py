"""What a soak is asked to do, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.soak.ledger import Ledger
from engine.soak.samples import Samples
from engine.soak.watch import Watch

FULL = 2
"""A burst has so many times the completions that slots and queues take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A soak. Times in seconds.

    work_s      traffic between two rests; rest_s: how long a rest lasts once all is checked
    kinds       of requests; empty: all
    burst       completions that overfill the queues; 0: no bursts, as the limits aren't known
    group       completions of a burst's request
    repeatable  sampled answers of one seed must be equal, too
    """

    minutes: float
    seed: int = 0
    clients: int = 8
    kinds: tuple[str, ...] = ()
    work_s: float = 60.0
    rest_s: float = 3.0
    sample_s: float = 30.0
    burst: int = 0
    group: int = 8
    repeatable: bool = False
    prefix: str = "sglang:"
    vocabulary: int = 0
    json: Path | None = None
    html: Path | None = None


@dataclass(slots=True)
class Outcome:
    """What the report is made of. minutes: how long the traffic lasted."""

    ledger: Ledger
    watch: Watch
    samples: Samples
    options: Options
    minutes: float = 0.0
    left_out: dict[str, str] = field(default_factory=dict)
    bursts: int = 0
    crowds: int = 0
    rests: int = 0
    canaries: int = 0
    exit_code: int | None = None
    stopped_early: bool = False


def within_limits(options: Options, slots: int, queued: int, ranks: int, most: int) -> Options:
    """Options with bursts that overfill `ranks` ranks of so many slots and places in the queue.

    most  completions that one request may have
    """
    return replace(options, burst=(slots + queued) * ranks * FULL, group=min(options.group, most))


def kinds_of(text: str) -> Sequence[str]:
    """A list with commas."""
    return tuple(filter(None, text.split(",")))
