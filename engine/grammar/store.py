"""Compiled grammars on disk, shared by all processes and by the starts to come.

An entry is a serialized grammar, or a marker that the key compiles within the limits and is faster compiled
than loaded. Entries of another library, vocabulary or policy lie in other folders. Every byte of an entry is
covered by a keyed checksum, which is verified before anything is read of it; where it doesn't hold the
request fails, and the file stays for inspection: it is never quietly compiled over.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from engine.errors import StoreCorrupt, StoreUnusable
from engine.grammar.key import GrammarKey
from engine.grammar.ledger import ENTRY, LOCK, TEMPORARY, Ledger, held, size_of
from engine.messages import GrammarArtifact

MAGIC = b"GRAMMAR1"
FORMAT = 1
HEADER = struct.Struct("<8sIIQQ32s32sQdd")
"""Magic, format, bytes of the key, of the payload, of the serial form, digest of the key, probe, bytes in
memory, seconds to compile and to load. Key, payload and checksum follow."""

CHECK_BYTES = 32
SECRET_BYTES = 32


class Store:
    """The entries of one scope.

    root         folder of all scopes; only this user may write to it
    scope        text that names all that entries depend on: library, vocabulary, policy
    limit_bytes  of all entries of all scopes
    errors       since start or `taken_errors`, by kind: corrupt, scope, io, over_limit
    pruned       entries that went for others, since start or `taken_pruned`, which took `prune_s` seconds

    raises  StoreUnusable
    """

    def __init__(self, root: Path, scope: str, limit_bytes: int) -> None:
        self.errors: Counter[str] = Counter()
        self.pruned = 0
        self.prune_s = 0.0
        self._ledger = Ledger(root, limit_bytes)
        self._scope = scope.encode("utf-8")
        try:
            self._folder = root / hashlib.sha256(self._scope).hexdigest()[:32]
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (root, self._folder):
                _demand_own(folder)
            self._secret = _secret_of(root)
            self._total = self._ledger.recover()
        except OSError as error:
            raise StoreUnusable(f"the grammar store {root} can't be used: {error}") from error

    def path(self, key: GrammarKey) -> Path:
        """Of the key's entry."""
        return self._folder / f"{key.digest}{ENTRY}"

    @contextmanager
    def locked(self, key: GrammarKey) -> Iterator[None]:
        """The key's entry, alone among all processes: around read, compile and publish.

        On a disk that takes no lock file the work goes on without one; that is counted.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(held(self.path(key).with_suffix(LOCK)))
                stack.callback(self._drop_lock, key)
            except OSError:
                self.errors["io"] += 1
            yield

    def _drop_lock(self, key: GrammarKey) -> None:
        """A key without an entry leaves nothing: keys that are refused would fill the folder."""
        if not self.path(key).exists():
            _remove(self.path(key).with_suffix(LOCK))

    def read(self, key: GrammarKey) -> GrammarArtifact | None:
        """The entry, which is used now; None where there is none or the disk can't be read (counted).

        raises  StoreCorrupt
        """
        path = self.path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:
            self.errors["io"] += 1
            return None
        return self._decoded(data, key)

    def publish(self, artifact: GrammarArtifact, key: GrammarKey) -> bool:
        """Writes the entry, whole or not at all, under its lock. False where it can't, which is counted."""
        data = self._encoded(artifact, key)
        path = self.path(key)
        temporary = path.with_suffix(TEMPORARY)
        try:
            _write(temporary, data)
            return self._rename(temporary, path, len(data))
        except OSError:
            self.errors["io"] += 1
            return False
        finally:
            _remove(temporary)

    def taken_errors(self) -> dict[str, int]:
        """The errors, which begin at nothing again."""
        errors, self.errors = self.errors, Counter()
        return dict(errors)

    def taken_pruned(self) -> tuple[int, float]:
        """Pruned entries and their seconds, which begin at nothing again."""
        found, self.pruned, self.prune_s = (self.pruned, self.prune_s), 0, 0.0
        return found

    def total_bytes(self) -> int:
        """Of all entries of all scopes; what was known last where the disk doesn't tell (counted)."""
        try:
            with self._ledger.change() as change:
                self._total = change.total
        except OSError:
            self.errors["io"] += 1
        return self._total

    def _rename(self, temporary: Path, path: Path, size: int) -> bool:
        with self._ledger.change() as change:
            change.begin()
            before = size_of(path)
            began_s = time.perf_counter()
            gone = change.make_room(size - before)
            if gone:
                self.pruned += gone
                self.prune_s += time.perf_counter() - began_s
            if change.total + size - before > self._ledger.limit_bytes:
                self.errors["over_limit"] += 1
                return False
            os.replace(temporary, path)
            change.total += size - before
            _sync(self._folder)
        return True

    # ---- bytes of an entry ---------------------------------------------------------------------

    def _encoded(self, artifact: GrammarArtifact, key: GrammarKey) -> bytes:
        text = key.wire().encode("utf-8")
        header = HEADER.pack(
            MAGIC,
            FORMAT,
            len(text),
            len(artifact.payload),
            artifact.raw_bytes,
            bytes.fromhex(key.digest),
            artifact.probe,
            artifact.memory_bytes,
            artifact.compile_s,
            artifact.load_s,
        )
        body = header + text + artifact.payload
        return body + self._check(body)

    def _decoded(self, data: bytes, key: GrammarKey) -> GrammarArtifact:
        body, check = data[:-CHECK_BYTES], data[-CHECK_BYTES:]
        if len(data) < HEADER.size + CHECK_BYTES or not hmac.compare_digest(self._check(body), check):
            raise self._corrupt("corrupt", key, f"its {len(data)} bytes aren't those that were written")
        magic, form, text_bytes, payload_bytes, raw, digest, probe, memory, compile_s, load_s = HEADER.unpack(
            body[: HEADER.size]
        )
        if (magic, form) != (MAGIC, FORMAT) or HEADER.size + text_bytes + payload_bytes != len(body):
            raise self._corrupt("corrupt", key, f"it has format {form} and {len(data)} bytes")
        text = body[HEADER.size : HEADER.size + text_bytes].decode("utf-8")
        if digest != bytes.fromhex(key.digest) or text != key.wire():
            raise self._corrupt("scope", key, f"it stands for another key, {digest.hex()[:16]}")
        return GrammarArtifact(text, body[HEADER.size + text_bytes :], raw, probe, memory, compile_s, load_s)

    def _corrupt(self, kind: str, key: GrammarKey, text: str) -> StoreCorrupt:
        self.errors[kind] += 1
        return StoreCorrupt(f"the stored grammar {key.digest[:16]} can't be trusted: {text}")

    def _check(self, body: bytes) -> bytes:
        """Over the scope too: an entry that was moved to another folder doesn't hold there."""
        scope = hashlib.sha256(self._scope).digest()
        return hmac.digest(self._secret, scope + body, "sha256")


def _demand_own(folder: Path) -> None:
    """Who can write entries chooses what the library is made to load."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        mode, owner = oct(found.st_mode & 0o777), found.st_uid
        raise StoreUnusable(f"{folder} belongs to user {owner} with mode {mode}; others must not write to it")


def _secret_of(root: Path) -> bytes:
    """The folder's key for checksums, made by whoever comes first."""
    path = root / "secret"
    if not path.exists():
        mine = root / f"secret.{secrets.token_hex(8)}"
        _write(mine, secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(mine, path)
        mine.unlink()
        _sync(root)
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES or path.stat().st_mode & 0o077:
        raise StoreUnusable(f"{path} has {len(secret)} bytes, not {SECRET_BYTES} for this user alone")
    return secret


def _write(path: Path, data: bytes) -> None:
    """The whole file, on the disk when this returns."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    with suppress(OSError):  # The next count removes it.
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """The folder's names are on the disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
