"""The bytes of a folder that many processes write to: counted under one lock, pruned to stay below a limit.

The count is in a small file. Whoever changes the folder first marks it as being changed: a process that ends
in between leaves the mark, and the next one counts anew and removes what was left half written. Locks are the
kernel's (flock): they end with the process that holds them, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RECORD = struct.Struct("<8s?7xQ16s")
MAGIC = b"LEDGER01"

ENTRY, LOCK, TEMPORARY = ".grammar", ".lock", ".tmp"
"""Of each entry: itself, the lock that writers, readers and the pruner hold, and what is being written."""


class Ledger:
    """The count of one folder, whose entries lie in folders of its own, one a scope."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._file = root / "ledger"

    @contextmanager
    def change(self) -> Iterator[Change]:
        """Alone among all processes; a count that can't be trusted is made anew first."""
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            total = _read(descriptor)
            change = Change(self, descriptor, self._recount() if total is None else total)
            yield change
            # A disk that is full may take nothing, not even over what is there: looking must not need it.
            if change.begun or change.total != total:
                change.close()
        finally:
            os.close(descriptor)

    def recover(self) -> int:
        """Counts anew and removes what dead writers left; the bytes that are there."""
        with self.change() as change:
            change.total = self._recount()
            return change.total

    def entries(self) -> list[Path]:
        """All of them, in all scopes."""
        return [path for path in self.root.glob(f"*/*{ENTRY}") if path.is_file()]

    def _recount(self) -> int:
        for temporary in self.root.glob(f"*/*{TEMPORARY}"):
            with held(temporary.with_suffix(LOCK), wait=False) as free:
                if free:
                    temporary.unlink(missing_ok=True)
        return sum(size_of(path) for path in self.entries())


class Change:
    """The ledger in the hands of one process.

    total  bytes of all entries
    begun  the count on the disk is marked as untrue
    """

    def __init__(self, ledger: Ledger, descriptor: int, total: int) -> None:
        self.total = total
        self.begun = False
        self._ledger = ledger
        self._descriptor = descriptor

    def begin(self) -> None:
        """From here on the count isn't true until this change is closed."""
        self.begun = True
        os.pwrite(self._descriptor, _record(True, self.total), 0)
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """The count is true again."""
        os.pwrite(self._descriptor, _record(False, self.total), 0)

    def make_room(self, size: int) -> int:
        """Prunes, least recently used first, until `size` bytes more fit. Returns how many entries went.

        An entry that is being read or written stays. Where no more can go, the total is left as it is: the
        caller looks whether `size` fits.
        """
        limit = self._ledger.limit_bytes
        gone = 0
        if self.total + size <= limit or size > limit:
            return 0
        for path in sorted(self._ledger.entries(), key=_used_ns):
            with held(path.with_suffix(LOCK), wait=False) as free:
                if free:
                    freed = size_of(path)
                    path.unlink(missing_ok=True)
                    path.with_suffix(LOCK).unlink(missing_ok=True)
                    self.total -= freed
                    gone += 1
            if self.total + size <= limit:
                break
        return gone


@contextmanager
def held(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds the lock file at `path`; False where it was not to be waited for and another holds it.

    The one that is held is the one that has the name: a pruner may have removed it meanwhile.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            yield False
            return
        except BaseException:
            os.close(descriptor)
            raise
        if _is_named(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield True
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _used_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def _record(changing: bool, total: int) -> bytes:
    check = hashlib.sha256(f"{changing} {total}".encode()).digest()[:16]
    return RECORD.pack(MAGIC, changing, total, check)


def _read(descriptor: int) -> int | None:
    """The count; None where there is none, or a change was not closed."""
    data = os.pread(descriptor, RECORD.size, 0)
    if len(data) != RECORD.size:
        return None
    _, changing, total, _ = RECORD.unpack(data)
    return None if changing or data != _record(changing, total) else int(total)
