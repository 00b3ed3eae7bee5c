"""In a rank: from the artifact that came with a request to the request's own matcher, never on the loop.

The same core as in the api process decides (specs/grammar.toml): a grammar that is in memory gives a matcher
at once, one that is being loaded is joined, else a thread loads it. A job here loads what is known to compile
within the limits. It can't be killed: one that is late fails its requests and goes on alone (I4).
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.actors.core import Effect, Reply, Send
from engine.actors.grammar import Grammars
from engine.actors.grammar_keys import GrammarLimits
from engine.errors import EngineError
from engine.grammar.compiler import Compiler, compiled_of
from engine.grammar.matchers import Matcher
from engine.grammar.worker import NICENESS
from engine.messages import (
    GrammarArtifact,
    GrammarBroken,
    GrammarBuilt,
    GrammarCompile,
    GrammarLeft,
    GrammarReady,
    GrammarWanted,
    Tick,
)

Give = Callable[[Matcher | EngineError], None]
"""Called once, on the loop's thread: the request's matcher, or why it fails."""


class MatcherLoader:
    """All calls are the loop's thread's.

    compiler  over `whole_library()`, used by the loading threads alone
    limits    `workers` is the number of threads
    post      runs a function on the loop's thread; called from other threads
    now_s     the loop's clock
    """

    def __init__(
        self,
        compiler: Compiler,
        limits: GrammarLimits,
        post: Callable[[Callable[[], None]], None],
        now_s: Callable[[], float],
    ) -> None:
        self._compiler = compiler
        self._core = Grammars(limits, workers="loaders")
        self._post = post
        self._now_s = now_s
        self._threads = ThreadPoolExecutor(limits.workers, "grammar loader", stand_behind)
        self._artifacts: dict[str, GrammarArtifact] = {}
        self._give: dict[int, Give] = {}

    @property
    def counts(self) -> Counter[str]:
        """Of the core: see `Grammars.counts`."""
        return self._core.counts

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the grammars whose matchers are in use."""
        return self._core.cache.pinned_bytes

    def want(self, request: int, artifact: GrammarArtifact, give: Give) -> None:
        """A matcher for a request, once; `leave` ends it. `give` may be called before this returns."""
        self._give[request] = give
        self._artifacts[artifact.key] = artifact
        self._tell(GrammarWanted(artifact.key, request, self._now_s(), request))

    def leave(self, request: int) -> None:
        """The request is over, with or without its matcher, which must not be used any more."""
        self._give.pop(request, None)
        self._tell(GrammarLeft(request))

    def tick(self) -> None:
        """Some times a second: notices what is late."""
        self._tell(Tick(self._now_s()))

    def close(self) -> None:
        """Waits for what is being loaded."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _tell(self, msg: Any) -> None:
        for effect in self._core.receive(msg):
            self._carry_out(effect)
        # Those that are in memory, or that nobody loads any more, aren't needed.
        for key in [key for key in self._artifacts if not self._core.keys.is_on_its_way(key)]:
            del self._artifacts[key]

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Reply):
            give = self._give.pop(effect.slot, None)
            if isinstance(effect.value, GrammarReady) and give is not None:
                give(Matcher(effect.value.value, self._compiler.vocabulary.size))
            elif give is not None:
                give(effect.value)
        elif isinstance(effect, Send) and isinstance(effect.msg, GrammarCompile):
            job = effect.msg
            self._threads.submit(self._load, job.job, self._artifacts[job.key])

    def _load(self, job: int, artifact: GrammarArtifact) -> None:
        """On a thread."""
        answer: GrammarBuilt | GrammarBroken
        try:
            compiled = compiled_of(self._compiler.load(artifact))
            source = "disk" if artifact.payload else "local_compile_marker"
            answer = GrammarBuilt(job, compiled, artifact.memory_bytes, source)
        except Exception as error:  # Whatever the library raises is this grammar's failure alone (I15).
            answer = GrammarBroken(job, "failed", f"{type(error).__name__}: {error}"[:300])
        self._post(lambda: self._tell(answer))


def stand_behind() -> None:
    """This thread runs where those of scheduler, device and loop leave a processor, as compilers do."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
