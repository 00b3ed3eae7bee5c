"""A process that compiles grammars, one at a time: `python -m engine.grammar.worker DESCRIPTOR`.

The library can't be interrupted, so whatever takes too long is ended with its process. It doesn't import
torch, so that another is there at once. Its settings come on standard input; messages go over the socket,
each with its length before it. A key's text is answered by an `Outcome`, FINISH by a `Finished` of the oldest
job that has had none: the service says when there is time for that. A worker that can't start says why.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import sys
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import msgspec

from engine.children import die_with_parent, leave_signals_to_parent
from engine.grammar.compiler import Compiler, check, library_version, native_part
from engine.grammar.store import Store
from engine.grammar.tokenizer_info import Vocabulary
from engine.grammar.worker_job import POLICY, Finished, Job

LENGTH = struct.Struct("<I")
READY = b"ready"
FINISH = b""
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


def started(settings: WorkerSettings) -> tuple[Compiler, Store | None]:
    """The library, which does what is expected of it, and the store. Raises what stands in the way."""
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiler = Compiler(settings.vocabulary, native_part())
    check(compiler)
    if not settings.store:
        return compiler, None
    return compiler, Store(Path(settings.store), scope_of(settings.vocabulary), settings.store_bytes)


def serve(link: socket.socket, compiler: Compiler, store: Store | None) -> None:
    """Jobs until the link ends, or until this worker is of no more use."""
    owed: deque[Job] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="markers") as disk:
        marked: Future[None] = disk.submit(lambda: None)
        while (wire := receive(link)) is not None:
            if wire == FINISH:
                marked.result()
                finished = owed.popleft().finish()
                if finished.retires:
                    _retire(link, finished, owed)
                send(link, msgspec.msgpack.encode(finished))
                continue
            job = Job(compiler, store)
            outcome = job.run(wire.decode("utf-8"))
            # One marker at a time is on its way: what a killed worker loses is bounded.
            marked.result()
            send(link, msgspec.msgpack.encode(outcome))
            owed.append(job)
            marked = disk.submit(job.mark)


def _retire(link: socket.socket, finished: Finished, owed: Collection[Job]) -> NoReturn:
    """The library is still busy in a thread, so an orderly end would wait. Others have their markers."""
    told = msgspec.structs.replace(finished, jobs=finished.jobs + len(owed))
    send(link, msgspec.msgpack.encode(told))
    link.close()
    os._exit(0)


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
    with socket.socket(fileno=int(sys.argv[1])) as link:
        try:
            settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=WorkerSettings)
            compiler, store = started(settings)
        except Exception as error:
            send(link, f"{type(error).__name__}: {error}".encode())
            raise
        send(link, READY)
        serve(link, compiler, store)


if __name__ == "__main__":
    main()
