"""What a compile worker does with one key: find it in the store, or compile it and decide what to keep.

The answer goes out as soon as the grammar is compiled. The marker that the key compiles within the limits is
published behind it, on a thread of its own, while the next key is compiled: most of that is waiting for the
disk. Whether the serial form is worth keeping is measured when no key waits. So the ranks of the first
requests compile, which takes less than serializing would, and a worker that is killed later has left the
marker.
"""

from __future__ import annotations

import threading
import time
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
"""A longer serial form takes longer to load than to compile. It is longer than the grammar in memory, 1.1 to
2.1 times where that was measured, and without bound where rules share what they hold (gigabytes for 9 MB)."""

LOAD_SHARE = 0.5
"""Loading must take at most this share of compiling."""

SERIALIZE_SHARE = 2.5
"""Serializing takes two to five times as long as loading: one that takes longer than this share of compiling
isn't waited for, since loading would take more than LOAD_SHARE."""


class Outcome(msgspec.Struct, frozen=True):
    """Worker -> service: the one answer to a job.

    kind      built, unfit, corrupt or failed                source  as in GrammarReady
    seconds   of each phase so far: lock, read, compile      errors  of the store since the last message
    """

    kind: str
    text: str = ""
    source: str = ""
    artifact: GrammarArtifact | None = None
    seconds: dict[str, float] = {}
    errors: dict[str, int] = {}


class Finished(msgspec.Struct, frozen=True):
    """Worker -> service, behind the answer and when asked for: the disk has what it gets of a job.

    seconds      of each phase since the answer: publish (prune is a part of it), serialize, deserialize
    errors       of the store since the last message, by kind
    jobs         that this stands for: a worker that retires leaves the others it owes with their markers
    pruned       entries that went for this one              store_bytes  of all entries
    retires      the library still serializes what nobody waits for: the worker ends, another takes its place
    """

    seconds: dict[str, float] = {}
    errors: dict[str, int] = {}
    jobs: int = 1
    pruned: int = 0
    store_bytes: int = 0
    retires: bool = False


class Job:
    """One key in a worker: `run`, send what it returns; `mark` on any thread; `finish` when there is time.

    The key's entry is locked until its marker is there. Nobody waits for a lock who holds another one that
    doesn't come free by itself.
    """

    def __init__(self, compiler: Compiler, store: Store | None) -> None:
        self._compiler = compiler
        self._store = store
        self._locked = ExitStack()
        self._fresh: tuple[GrammarKey, Any, GrammarArtifact] | None = None
        self._retires = False
        self._seconds: dict[str, float] = {}

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
        seconds, self._seconds = self._seconds, {}
        errors = self._store.taken_errors() if self._store else {}
        return msgspec.structs.replace(found, seconds=seconds, errors=errors)

    def mark(self) -> None:
        """Publishes the marker of a grammar that was compiled, and lets go of the entry."""
        with self._locked:
            if self._fresh is not None and self._store is not None:
                with self._phase("publish"):
                    self._store.publish(self._fresh[2], self._fresh[0])

    def finish(self) -> Finished:
        """Behind `mark`: what the disk gets beyond the marker."""
        if self._store is None:
            return Finished(self._seconds)
        if self._fresh is not None:
            key, handle, marker = self._fresh
            packed = self._packed(handle, marker)
            if packed is not None:
                with self._store.locked(key), self._phase("publish"):
                    self._store.publish(packed, key)
        pruned, prune_s = self._store.taken_pruned()
        if pruned:
            self._seconds["prune"] = prune_s
        errors = self._store.taken_errors()
        return Finished(self._seconds, errors, 1, pruned, self._store.total_bytes(), self._retires)

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

    def _packed(self, handle: Any, marker: GrammarArtifact) -> GrammarArtifact | None:
        """With the serial form, if loading it was measured to be worth it."""
        if marker.compile_s < LEAST_COMPILE_S or marker.memory_bytes > MOST_RAW_BYTES:
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
