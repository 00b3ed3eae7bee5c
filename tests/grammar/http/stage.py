"""The scripted engine of the API tests with a real compile service: what HTTP asks reaches the rank."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import msgspec

from engine.actors.grammar_keys import GrammarLimits
from engine.actors.mailbox import Mailbox
from engine.errors import EngineError
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.key import GrammarKey
from engine.messages import Entry, GrammarArtifact, MatcherReady, MatcherWanted, Message
from tests.api.stage import Script, Stage, stage
from tests.grammar.service.stage import Running, patient, running, vocabulary


@cache
def library() -> Compiler:
    """As a rank has it."""
    return Compiler(vocabulary(), whole_library())


class Matchers:
    """The rank's actor of that name: loads what came with a request, at once and truly."""

    def __init__(self, rank: Mailbox) -> None:
        self._rank = rank

    def tell(self, msg: Message) -> None:
        """Takes MatcherWanted and MatcherLeft."""
        if isinstance(msg, MatcherWanted):
            try:
                library().load(msgspec.msgpack.decode(msg.grammar, type=GrammarArtifact))
                self._rank.tell(MatcherReady(msg.request_id))
            except EngineError as error:
                self._rank.tell(MatcherReady(msg.request_id, 500, str(error)))

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)


class Constrained:
    """A running engine.

    entries  all that ingress was sent, in order
    """

    def __init__(self, made: Stage, compiling: Running) -> None:
        self.made = made
        self.compiling = compiling
        self.entries: list[Entry] = []
        submit = made.engine.submit

        async def noted(entries: Any, route: int = -1) -> Any:
            self.entries += entries
            return await submit(entries, route)

        made.engine.submit = noted  # type: ignore[method-assign]

    @property
    def keys(self) -> list[GrammarKey]:
        """Of the entries; each artifact is checked to be its key's."""
        found = []
        for entry in self.entries:
            artifact = msgspec.msgpack.decode(entry.grammar, type=GrammarArtifact)
            assert artifact.key == entry.grammar_key
            found.append(GrammarKey.from_wire(entry.grammar_key))
        return found

    def figure(self, name: str) -> float:
        """A series without further labels, as the scrape has it."""
        return self.series(name)['{model_name="nano"}']

    def series(self, name: str) -> dict[str, float]:
        """All samples of a name: labels -> value."""
        lines = self.made.metrics.exposition().decode().splitlines()
        found = [line.removeprefix(f"sglang:{name}") for line in lines if line.startswith(f"sglang:{name}{{")]
        return {labels: float(value) for labels, value in (line.rsplit(" ", 1) for line in found)}


@asynccontextmanager
async def constrained(
    script: Script, limits: GrammarLimits | None = None, **flags: Any
) -> AsyncIterator[Constrained]:
    """An engine with this script and these limits of compiling."""
    async with (
        running(limits or patient()) as compiling,
        stage(script, grammars=compiling.service, **flags) as made,
    ):
        made.refs["matchers"] = Matchers(made.rank)
        yield Constrained(made, compiling)
