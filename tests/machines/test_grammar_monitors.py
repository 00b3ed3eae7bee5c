"""Each monitor of compiled grammars is broken by a planted fault: none is vacuous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.actors.grammar import Grammars
from engine.actors.grammar_keys import GrammarKeys
from engine.grammar.cache import GrammarCache, Kept
from engine.messages import GrammarBuilt
from tests.search.planting import explored


def nothing(self: Any, msg: Any) -> None:
    """Does nothing."""


def never(self: Any, msg: Any) -> bool:
    """Says no."""
    return False


def keeps_all(
    self: GrammarCache, key: str, value: Any, size: int, readers: int
) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Looks at no limit."""
    self._kept[key] = Kept(value, size, readers)
    self.bytes += size
    return True, ()


def drops_the_oldest(self: GrammarCache) -> str:
    """Whoever reads it."""
    key = next(iter(self._kept))
    self.bytes -= self._kept.pop(key).size
    return key


def fits(
    self: GrammarCache, key: str, value: Any, size: int, readers: int
) -> tuple[bool, tuple[tuple[str, str], ...]]:
    """Makes room at any price."""
    gone = []
    while len(self) >= self.limit_entries:
        gone.append((drops_the_oldest(self), "entries"))
    self._kept[key] = Kept(value, size, readers)
    self.bytes += size
    return True, tuple(gone)


def gives_another(self: Grammars, msg: GrammarBuilt) -> None:
    """Hands out a grammar under another name."""
    keep(self, GrammarBuilt(msg.job, "another", msg.size, msg.source))


def leaves_the_pin(self: Grammars, msg: Any) -> None:
    """Forgets the reader, and keeps the entry for ever."""
    del self.reads[msg.ticket]


def starts_twice(self: Grammars) -> None:
    """Gives out a key that a worker has."""
    dispatch(self)
    if self.keys.jobs and self.idle:
        self.last_job += 1
        self.keys.jobs[self.last_job] = next(iter(self.keys.jobs.values()))
        self.idle -= 1


def waits_and_reads(self: Grammars, msg: Any) -> None:
    """Counts a request that waits as a reader, too."""
    join(self, msg)
    self.reads[msg.ticket] = msg.key


def stays_waiting(self: GrammarKeys, places: Any, at: Any, msg: Any) -> None:
    """Forgets the key, and not who waits for it."""
    forget(self, places, at, msg)
    for key in list(self.waiting):
        self.queue.append(key)


def gives_out_nothing(self: Grammars) -> None:
    """Leaves the queue as it is."""


def answers_nobody(self: Grammars, key: str, error: Exception) -> None:
    """Forgets those who wait, and not for what."""
    self.keys.waiting.pop(key, None)


keep, dispatch, join, forget = Grammars.keep, Grammars._dispatch, Grammars.join, GrammarKeys.forget

# search, class, its method, what stands in its place, the monitor that notices
PLANTED: list[tuple[str, type, str, Callable[..., Any], str]] = [
    ("grammars-workers", Grammars, "_dispatch", starts_twice, "I4"),
    ("grammars-workers", GrammarCache, "put", keeps_all, "G1"),
    ("grammars-shared", GrammarCache, "put", fits, "G1"),
    ("grammars-shared", Grammars, "release", leaves_the_pin, "G1"),
    ("grammars-shared", Grammars, "join", waits_and_reads, "G1"),
    ("grammars-late", Grammars, "_fail", answers_nobody, "G2"),
    ("grammars-shared", Grammars, "_dispatch", gives_out_nothing, "nobody_waits"),
    ("grammars-late", GrammarKeys, "forget", stays_waiting, "GK1"),
    ("grammars-shared", Grammars, "leave", nothing, "who_left_is_forgotten"),
    ("grammars-shared", Grammars, "keep", gives_another, "answers_are_true"),
    ("grammars-shared", Grammars, "has_room", never, "there_is_room"),
    ("grammars-remembered", Grammars, "is_refused", never, "refusals_are_remembered"),
    ("grammars-shared", Grammars, "release", nothing, "who_left_is_forgotten"),
]


@pytest.mark.parametrize(("search", "owner", "method", "fault", "monitor"), PLANTED)
def test_a_planted_fault_is_noticed_by_its_monitor(
    search: str,
    owner: type,
    method: str,
    fault: Callable[..., Any],
    monitor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, fault)
    assert monitor in explored(search, monkeypatch).text
