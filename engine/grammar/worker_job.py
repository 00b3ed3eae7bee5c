"""What a compile worker does with one key: find it in the store, or compile it and decide what to keep.

The answer goes out as soon as the grammar is compiled; what the disk gets is decided and written behind it.
So the ranks of the first requests compile, which takes less than serializing would. The marker that the key
compiles within the limits is published first: a worker that is killed while it measures leaves that.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from engine.errors import EngineError, GrammarRefused, StoreCorrupt
from engine.grammar.compiler import Compiler, deflated, inflated
from engine.grammar.key import GrammarKey
from engine.grammar.store import Store
from engine.messages import GrammarArtifact

POLICY = 1
"""Version of the rules below; part of the store's scope."""

LEAST_COMPILE_S = 0.005
"""What compiles faster than this is never worth loading."""

MOST_RAW_BYTES = 1 << 20
"""A longer serial form takes longer to load than to compile."""

LOAD_SHARE = 0.5
"""Loading must take at most this share of compiling."""

SERIALIZE_SHARE = 2.5
"""Serializing takes two to five times as long as loading: one that takes longer than this share of compiling
isn't waited for, since loading would take more than LOAD_SHARE."""


class Outcome(msgspec.Struct, frozen=True):
    """Worker -> service: the one answer to a job.

    kind      built, unfit, corrupt or failed                source  as in GrammarReady
    seconds   of each phase so far: lock, read, compile      errors  of the store so far, by kind
    """

    kind: str
    text: str = ""
    source: str = ""
    artifact: GrammarArtifact | None = None
    seconds: dict[str, float] = {}
    errors: dict[str, int] = {}


class Finished(msgspec.Struct, frozen=True):
    """Worker -> service, behind the answer: the disk has what it gets.

    seconds      of each phase since the answer: publish (prune is a part of it), serialize, deserialize
    errors       of the store since then, by kind
    pruned       entries that went for this one              store_bytes  of all entries
    retires      the library still serializes what nobody waits for: the worker ends, another takes its place
    """

    seconds: dict[str, float] = {}
    errors: dict[str, int] = {}
    pruned: int = 0
    store_bytes: int = 0
    retires: bool = False


class Job:
    """One key in a worker: `run`, send what it returns, `finish`. The key's entry is locked throughout."""

    def __init__(self, compiler: Compiler, store: Store | None) -> None:
        self._compiler = compiler
        self._store = store
        self._locked = ExitStack()
        self._fresh: tuple[GrammarKey, Any, GrammarArtifact] | None = None
        self._retires = False
        self._seconds: dict[str, float] = {}
        self._errors = Counter(store.errors) if store else Counter()
        self._pruned = (store.pruned, store.prune_s) if store else (0, 0.0)

    def run(self, wire: str) -> Outcome:
        """The answer; every error that has a cause in the key or the store is one, too."""
        try:
            artifact, source = self._resolved(GrammarKey.from_wire(wire))
            found = Outcome("built", "", source, artifact)
        except GrammarRefused as error:
            found = Outcome("unfit", str(error))
        except StoreCorrupt as error:
            found = Outcome("corrupt", str(error))
        except (EngineError, MemoryError) as error:
            found = Outcome("failed", f"{type(error).__name__}: {error}")
        seconds, errors = self._taken()
        return msgspec.structs.replace(found, seconds=seconds, errors=errors)

    def finish(self) -> Finished:
        """What the disk gets of a grammar that was compiled."""
        with self._locked:
            if self._fresh is not None and self._store is not None:
                self._keep(self._store, *self._fresh)
        seconds, errors = self._taken()
        if self._store is None:
            return Finished(seconds)
        pruned = self._store.pruned - self._pruned[0]
        if pruned:
            seconds["prune"] = self._store.prune_s - self._pruned[1]
        return Finished(seconds, errors, pruned, self._store.total_bytes(), self._retires)

    def _resolved(self, key: GrammarKey) -> tuple[GrammarArtifact, str]:
        if self._store is not None:
            with self._phase("lock"):
                self._locked.enter_context(self._store.locked(key))
            with self._phase("read"):
                found = self._store.read(key)
            if found is not None:
                return found, "disk" if found.payload else "local_compile_marker"
        return self._compiled(key), "compile"

    def _compiled(self, key: GrammarKey) -> GrammarArtifact:
        with self._phase("compile"):
            handle = self._compiler.compile(key)
        marker = GrammarArtifact(
            key=key.wire(),
            payload=b"",
            raw_bytes=0,
            probe=self._compiler.probe(handle),
            memory_bytes=int(handle.memory_size_bytes()),
            compile_s=self._seconds["compile"],
            load_s=0.0,
        )
        self._fresh = key, handle, marker
        return marker

    def _keep(self, store: Store, key: GrammarKey, handle: Any, marker: GrammarArtifact) -> None:
        with self._phase("publish"):
            store.publish(marker, key)
        packed = self._packed(handle, marker)
        if packed is not None:
            with self._phase("publish"):
                store.publish(packed, key)

    def _taken(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds and errors since the last call."""
        seconds, self._seconds = self._seconds, {}
        errors = Counter(self._store.errors) if self._store else Counter()
        new = errors - self._errors
        self._errors = errors
        return seconds, dict(new)

    def _packed(self, handle: Any, marker: GrammarArtifact) -> GrammarArtifact | None:
        """With the serial form, if loading it was measured to be worth it."""
        if marker.compile_s < LEAST_COMPILE_S:
            return None
        with self._phase("serialize"):
            text = self._serialized(handle, SERIALIZE_SHARE * marker.compile_s)
        if text is None:
            return None
        raw_bytes = len(text.encode("utf-8"))
        if raw_bytes > MOST_RAW_BYTES:
            return None
        payload = deflated(text)
        with self._phase("deserialize"):
            loaded = self._compiler.deserialize(inflated(payload, raw_bytes))
        load_s = self._seconds["deserialize"]
        if load_s > LOAD_SHARE * marker.compile_s or self._compiler.probe(loaded) != marker.probe:
            return None
        return msgspec.structs.replace(marker, payload=payload, raw_bytes=raw_bytes, load_s=load_s)

    def _serialized(self, handle: Any, within_s: float) -> str | None:
        """None where it takes longer; the library can't be stopped, so this worker is of no more use then."""
        made: list[str] = []
        thread = threading.Thread(
            target=lambda: made.append(self._compiler.serialize(handle)), name="serialize", daemon=True
        )
        thread.start()
        thread.join(within_s)
        self._retires = thread.is_alive()
        return made[0] if made else None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began_s
