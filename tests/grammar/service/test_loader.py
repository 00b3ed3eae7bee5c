"""A rank's way from artifact to matcher: loaded once on a thread, joined, kept while it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from engine.actors.grammar_keys import GrammarLimits
from engine.errors import EngineError, GrammarFailed, GrammarTimedOut
from engine.grammar.compiler import Compiler, deflated, whole_library
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher
from engine.grammar.matchers_loader import MatcherLoader
from engine.messages import GrammarArtifact
from tests.grammar.service.stage import strings, vocabulary, word


class Loop:
    """A loop's thread: runs what is posted, notes what is given."""

    def __init__(self, **limits: float) -> None:
        self.now_s = 0.0
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.given: dict[int, Matcher | EngineError] = {}
        self.compiler = Compiler(vocabulary(), whole_library())
        self.loader = MatcherLoader(
            self.compiler,
            GrammarLimits(**limits),  # type: ignore[arg-type]
            self.posted.put,
            lambda: self.now_s,
        )

    def artifact(self, key: GrammarKey, with_payload: bool = False) -> GrammarArtifact:
        """As a worker makes it."""
        handle = self.compiler.compile(key)
        text = self.compiler.serialize(handle) if with_payload else ""
        payload = deflated(text) if with_payload else b""
        probe, size = self.compiler.probe(handle), int(handle.memory_size_bytes())
        return GrammarArtifact(key.wire(), payload, len(text.encode()), probe, size, 0.01, 0.001)

    def want(self, request: int, artifact: GrammarArtifact) -> None:
        """A request."""

        def give(got: Matcher | EngineError) -> None:
            assert request not in self.given
            self.given[request] = got

        self.loader.want(request, artifact, give)

    def until(self, holds: Callable[[], bool]) -> None:
        """Ticks, and runs what is posted."""
        self.loader.tick()
        while not holds():
            self.posted.get(timeout=60)()
            self.loader.tick()


@pytest.fixture
def loop() -> Iterator[Loop]:
    found = Loop(cache_entries=2)
    yield found
    found.loader.close()


@pytest.mark.parametrize("with_payload", [False, True])
def test_requests_of_one_grammar_load_it_once_and_get_matchers_of_their_own(
    loop: Loop, with_payload: bool
) -> None:
    artifact = loop.artifact(word("ab"), with_payload)
    threads = set(threading.enumerate())
    for request in range(8):
        loop.want(request, artifact)
    loop.until(lambda: len(loop.given) == 8)
    matchers = [got for got in loop.given.values() if isinstance(got, Matcher)]
    assert len({id(matcher.handle) for matcher in matchers}) == 8
    assert loop.loader.counts["compiles"] == 1
    assert loop.loader.counts["disk" if with_payload else "local_compile_marker"] == 1
    assert [thread for thread in threading.enumerate() if thread not in threads]
    matchers[0].advance([vocabulary().tokens.index(b"ab")])
    assert [matcher.tokens for matcher in matchers] == [1, *[0] * 7]
    loop.want(9, artifact)
    assert isinstance(loop.given[9], Matcher)  # At once, from memory.
    assert loop.loader.pinned_bytes > 0
    for request in (*range(8), 9):
        loop.loader.leave(request)
    assert loop.loader.pinned_bytes == 0


def test_an_artifact_that_gives_other_masks_fails_its_requests_alone(loop: Loop) -> None:
    good, other = loop.artifact(word("ab")), loop.artifact(strings("c"), with_payload=True)
    loop.want(1, msgspec.structs.replace(other, probe=b"x" * 32))
    loop.want(2, msgspec.structs.replace(good, key=word("cd").wire()))
    loop.want(3, good)
    loop.until(lambda: len(loop.given) == 3)
    assert isinstance(loop.given[1], GrammarFailed)
    assert "other masks" in str(loop.given[1])
    assert isinstance(loop.given[2], GrammarFailed)
    assert isinstance(loop.given[3], Matcher)


def test_a_request_that_leaves_gets_nothing_and_pins_nothing(loop: Loop) -> None:
    loop.want(1, loop.artifact(strings("a")))
    loop.loader.leave(1)
    loop.until(lambda: loop.loader.counts["compiles"] == 1)
    assert not loop.given
    assert loop.loader.pinned_bytes == 0


def test_a_late_load_fails_its_requests_and_nobody_loads_the_key_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread can't be ended; whoever comes next gets what it makes."""
    loop = Loop(timeout_s=1.0, workers=2)
    artifact, go_on, load = loop.artifact(word("ab")), threading.Event(), Compiler.load

    def slow(self: Compiler, wanted: GrammarArtifact) -> Any:
        assert go_on.wait(60)
        return load(self, wanted)

    monkeypatch.setattr(Compiler, "load", slow)
    loop.want(1, artifact)
    loop.now_s = 0.9
    loop.until(lambda: True)
    assert not loop.given
    loop.now_s = 1.0
    loop.until(lambda: 1 in loop.given)
    assert isinstance(loop.given[1], GrammarTimedOut)
    loop.want(2, artifact)
    go_on.set()
    loop.until(lambda: 2 in loop.given)
    assert isinstance(loop.given[2], Matcher)
    assert loop.loader.counts["timeouts"] == 1
    loop.want(3, artifact)
    assert isinstance(loop.given[3], Matcher)
    assert loop.loader.counts["compiles"] == 1
    loop.loader.close()
