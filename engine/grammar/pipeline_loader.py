"""The actor `matchers` of a rank: grammars that came with requests become matchers; the loop never waits."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec

from engine.actors.device import loop_poster
from engine.actors.grammar_keys import GrammarLimits
from engine.actors.timers import Timers
from engine.errors import EngineError, Unexpected
from engine.grammar.matchers import Matcher
from engine.grammar.matchers_loader import MatcherLoader
from engine.grammar.rank_grammars import RankGrammars
from engine.messages import GrammarArtifact, MatcherLeft, MatcherReady, MatcherWanted, Message

TICK_S = 0.05
"""How late it may be noticed that a grammar isn't loaded in time."""

AFTER_THINK = "after_think"


class Matchers:
    """Made, and called, on the loop.

    answer  takes MatcherReady
    """

    name = "matchers"

    def __init__(
        self,
        grammars: RankGrammars,
        limits: GrammarLimits,
        answer: Callable[[MatcherReady], None],
        timers: Timers,
    ) -> None:
        post = loop_poster()
        self.pipeline = grammars.pipeline
        self.loader = MatcherLoader(
            grammars.compiler, limits, lambda act: _post(post, act), anyio.current_time
        )
        self._answer = answer
        self._timers = timers
        self._artifacts = msgspec.msgpack.Decoder(GrammarArtifact)
        self._loading: set[int] = set()
        self._entered: set[int] = set()

    def tell(self, msg: Message) -> None:
        """Takes MatcherWanted and MatcherLeft; never waits."""
        if isinstance(msg, MatcherWanted):
            self._want(msg)
        elif isinstance(msg, MatcherLeft):
            self._leave(msg.request_id)
        else:
            raise Unexpected(f"matchers: {type(msg).__name__} isn't among its messages")

    async def offer(self, msg: Message) -> None:
        """As `tell`."""
        self.tell(msg)

    def close(self) -> None:
        """Ends the threads."""
        self.loader.close()
        self.pipeline.close()

    def _want(self, msg: MatcherWanted) -> None:
        after_think = msg.root == AFTER_THINK
        if after_think and not self.pipeline.reasons:
            self._refuse(msg.request_id, 400, "the model has no reasoning behind which a grammar could begin")
            return
        try:
            artifact = self._artifacts.decode(msg.grammar)
        except msgspec.DecodeError as error:
            self._refuse(msg.request_id, 500, f"the compiled grammar can't be read: {error}")
            return

        def give(got: Matcher | EngineError) -> None:
            self._loading.discard(msg.request_id)
            if isinstance(got, Matcher):
                self._entered.add(msg.request_id)
                self.pipeline.enter(msg.request_id, got, msg.prompt_tokens, after_think)
                self._answer(MatcherReady(msg.request_id))
            else:
                self._refuse(msg.request_id, got.http_status, f"{type(got).__name__}: {got}")

        if not self._loading:
            self._timers.after(TICK_S, self._tick)
        self._loading.add(msg.request_id)
        self.loader.want(msg.request_id, artifact, give)

    def _leave(self, request: int) -> None:
        self._loading.discard(request)
        self.loader.leave(request)
        if request in self._entered:
            self._entered.remove(request)
            self.pipeline.leave(request)

    def _refuse(self, request: int, status: int, text: str) -> None:
        self._answer(MatcherReady(request, status, text))

    def _tick(self) -> None:
        if self._loading:
            self.loader.tick()
            self._timers.after(TICK_S, self._tick)


def _post(post: Callable[..., object], act: Callable[[], None]) -> None:
    """Runs `act` on the loop soon; without a loop nobody waits for it any more."""
    try:
        post(act)
    except RuntimeError:
        return
