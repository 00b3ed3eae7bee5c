"""How a server ended: the first cause, what each process still said, and how long each phase took."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LOG = logging.getLogger("engine.launch")
PHASES = ("drain", "stop", "kill", "close")
CONSEQUENCES = ("PeerDead", "ExchangeTimeout", "ExchangeClosed", "CollectiveFailed")
"""Errors by which a process says that another one was first."""


@dataclass(frozen=True, slots=True)
class Death:
    """An end of a process that nobody had asked for.

    words  what it said before
    at_s   the host's monotonic clock
    """

    name: str
    how: str
    words: str
    at_s: float

    @property
    def follows(self) -> bool:
        """It ended because another one had."""
        return any(f": {kind}: " in line for line in self.words.splitlines() for kind in CONSEQUENCES)


class EndReport:
    """Gathers ends while they come, and tells them in one report.

    deaths  ends that nobody had asked for
    """

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self._words: list[tuple[str, str]] = []

    @property
    def is_empty(self) -> bool:
        """Every process ended as it was asked to, without a word."""
        return not self.deaths and not self._words

    def note_death(self, name: str, how: str, words: str) -> None:
        """A process ended by itself, or was given up."""
        self.deaths.append(Death(name, how, words, time.monotonic()))

    def note_words(self, name: str, words: str) -> None:
        """What a process said that ended as it was asked to."""
        if words:
            self._words.append((name, words))

    def text(self, recorders: str) -> str:
        """The words of each process in the order of their ends, then who ended first, and who followed."""
        deaths = sorted(self.deaths, key=lambda death: (death.follows, death.at_s))
        told = [(one.name, one.words) for one in deaths if one.words] + self._words
        lines = [f"---- last words of {name} ----\n{words}" for name, words in told]
        if recorders:
            lines.append(f"---- the server's own actors ----\n{recorders}")
        if deaths:
            lines.append(f"first cause: {deaths[0].name} {deaths[0].how}")
            first_s = deaths[0].at_s
            lines += [f"then: {one.name} {one.how} ({one.at_s - first_s:+.3f} s)" for one in deaths[1:]]
        return "\n".join(lines)


class PhaseTimes(Collector):
    """Seconds that each phase of the end has taken so far; a metric, and a line in the log."""

    def __init__(self, prefix: str) -> None:
        self.took_s: dict[str, float] = {}
        self._name = f"{prefix}shutdown_phase_seconds"
        self._phase = ""
        self._began_s = 0.0

    def enter(self, phase: str) -> None:
        """The next phase begins; the one before is over."""
        self._close()
        self._phase, self._began_s = phase, time.monotonic()
        LOG.info("shutdown: %s", phase)

    def end(self) -> None:
        """The last phase is over."""
        self._close()
        if self.took_s:
            spent = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.took_s.items())
            LOG.info("shutdown took: %s", spent)

    def _close(self) -> None:
        if self._phase:
            self.took_s[self._phase] = time.monotonic() - self._began_s
            self._phase = ""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """As Collector."""
        family = GaugeMetricFamily(self._name, "of a phase of the server's end, so far", labels=("phase",))
        now_s = time.monotonic()
        for phase in PHASES:
            running = now_s - self._began_s if phase == self._phase else 0.0
            family.add_metric((phase,), self.took_s.get(phase, running))
        yield family
