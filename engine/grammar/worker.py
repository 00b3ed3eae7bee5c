"""A process that compiles grammars, one at a time: `python -m engine.grammar.worker DESCRIPTOR`.

The library can't be interrupted, so whatever takes too long is ended with its process. It doesn't import
torch, so that another is there at once. Its settings come on standard input; jobs and answers go over the
socket, each with its length before it: a key's text, and then an `Outcome` and a `Finished`.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from pathlib import Path

import msgspec

from engine.children import die_with_parent, leave_signals_to_parent
from engine.grammar.compiler import Compiler, check, library_version, native_part
from engine.grammar.store import Store
from engine.grammar.tokenizer_info import Vocabulary
from engine.grammar.worker_job import POLICY, Job

LENGTH = struct.Struct("<I")
READY = b"ready"
NICENESS = 10
"""The schedulers and the device threads of the same host come first."""


class WorkerSettings(msgspec.Struct, frozen=True):
    """What every worker of a server is told.

    store         folder of the persistent cache; empty: none
    store_bytes   its limit
    memory_bytes  address space that one worker may have
    """

    vocabulary: Vocabulary
    store: str = ""
    store_bytes: int = 1 << 30
    memory_bytes: int = 4 << 30


def scope_of(vocabulary: Vocabulary) -> str:
    """All that a stored grammar depends on, beside its key."""
    return f"policy {POLICY}; {library_version()}; eager; vocabulary {vocabulary.digest}"


def serve(link: socket.socket, settings: WorkerSettings) -> None:
    """Jobs until the link ends, or until this worker is of no more use."""
    compiler = Compiler(settings.vocabulary, native_part())
    check(compiler)
    store = None
    if settings.store:
        store = Store(Path(settings.store), scope_of(settings.vocabulary), settings.store_bytes)
    send(link, READY)
    while (wire := receive(link)) is not None:
        job = Job(compiler, store)
        send(link, msgspec.msgpack.encode(job.run(wire.decode("utf-8"))))
        finished = job.finish()
        send(link, msgspec.msgpack.encode(finished))
        if finished.retires:
            link.close()
            os._exit(0)  # The library is still busy in a thread, which an orderly end would wait for.


def send(link: socket.socket, data: bytes) -> None:
    """One message."""
    link.sendall(LENGTH.pack(len(data)) + data)


def receive(link: socket.socket) -> bytes | None:
    """One message; None at the link's end."""
    head = _exactly(link, LENGTH.size)
    return None if head is None else _exactly(link, LENGTH.unpack(head)[0])


def _exactly(link: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        got = link.recv(size - len(data))
        if not got:
            return None
        data += got
    return bytes(data)


def main() -> None:
    """The process."""
    die_with_parent()
    leave_signals_to_parent()
    os.nice(NICENESS)
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerSettings)
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=int(sys.argv[1])) as link:
        serve(link, settings)


if __name__ == "__main__":
    main()
