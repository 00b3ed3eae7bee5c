"""What a compile worker does with one key: find it in the store, or compile it and decide what to keep.

Kept is the serial form where loading it is worth it, else a marker that the key compiles within the limits.
The marker is published first: a worker that is killed while it measures leaves it, and nothing is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    seconds   of each phase: lock, read, deserialize, compile, serialize, publish
    errors    of the store during this job, by kind          pruned, store_bytes  of the store
    retires   the worker still serializes what nobody waits for: it ends, and another takes its place
    """

    kind: str
    text: str = ""
    source: str = ""
    artifact: GrammarArtifact | None = None
    seconds: dict[str, float] = {}
    errors: dict[str, int] = {}
    pruned: int = 0
    store_bytes: int = 0
    retires: bool = False


class Job:
    """One key in a worker."""

    def __init__(self, compiler: Compiler, store: Store | None) -> None:
        self.seconds: dict[str, float] = {}
        self.retires = False
        self._compiler = compiler
        self._store = store

    def run(self, wire: str) -> Outcome:
        """The answer; every error that has a cause in the key or the store is one, too."""
        before = dict(self._store.errors) if self._store else {}
        pruned = self._store.pruned if self._store else 0
        try:
            artifact, source = self._resolved(GrammarKey.from_wire(wire))
            found = Outcome("built", "", source, artifact)
        except GrammarRefused as error:
            found = Outcome("unfit", str(error))
        except StoreCorrupt as error:
            found = Outcome("corrupt", str(error))
        except (EngineError, MemoryError) as error:
            found = Outcome("failed", f"{type(error).__name__}: {error}")
        if self._store is None:
            return msgspec.structs.replace(found, seconds=self.seconds, retires=self.retires)
        errors = {kind: count - before.get(kind, 0) for kind, count in self._store.errors.items()}
        return msgspec.structs.replace(
            found,
            seconds=self.seconds,
            errors={kind: count for kind, count in errors.items() if count},
            pruned=self._store.pruned - pruned,
            store_bytes=self._store.total_bytes(),
            retires=self.retires,
        )

    def _resolved(self, key: GrammarKey) -> tuple[GrammarArtifact, str]:
        if self._store is None:
            return self._compiled(key), "compile"
        with self._phase("lock"):
            lock = self._store.locked(key)
            lock.__enter__()
        try:
            with self._phase("read"):
                found = self._store.read(key)
            if found is not None:
                return found, "disk" if found.payload else "local_compile_marker"
            return self._compiled(key), "compile"
        finally:
            lock.__exit__(None, None, None)

    def _compiled(self, key: GrammarKey) -> GrammarArtifact:
        with self._phase("compile"):
            handle = self._compiler.compile(key)
        marker = GrammarArtifact(
            key=key.wire(),
            payload=b"",
            raw_bytes=0,
            probe=self._compiler.probe(handle),
            memory_bytes=int(handle.memory_size_bytes()),
            compile_s=self.seconds["compile"],
            load_s=0.0,
        )
        self._publish(marker, key)
        packed = self._packed(handle, marker)
        if packed is None:
            return marker
        self._publish(packed, key)
        return packed

    def _publish(self, artifact: GrammarArtifact, key: GrammarKey) -> None:
        if self._store is not None:
            with self._phase("publish"):
                self._store.publish(artifact, key)

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
        began_s = time.perf_counter()
        with self._phase("deserialize"):
            loaded = self._compiler.deserialize(inflated(payload, raw_bytes))
        load_s = time.perf_counter() - began_s
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
        self.retires = thread.is_alive()
        return made[0] if made else None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began_s
