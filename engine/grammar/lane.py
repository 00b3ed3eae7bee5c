"""Jobs in the order in which they were handed over, one at a time.

A thread of the lane does them. Whoever can't go on without a job may do it itself, behind all that were
handed over before it: a job that is shorter than the way to another thread and back isn't worth that way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """One thread, and those that take its place for a moment."""

    def __init__(self, name: str) -> None:
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # One of these for each job: the thread that waits for it does so without the interpreter.
        self._there: SimpleQueue[None] = SimpleQueue()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Hands over a job; never waits."""
        if self._closed:
            raise RuntimeError(f"the lane {self._thread.name!r} is closed")
        future: Future[T] = Future()
        self._jobs.append((future, partial(job, *args)))
        self._there.put(None)
        return future

    def at_once(self, job: Callable[..., T], *args: Any) -> T:
        """Does a job on this thread, behind those handed over; waits for the one that is being done."""
        with self._turn:
            while self._jobs:
                self._do_next()
            return job(*args)

    def close(self) -> None:
        """Waits for the jobs that are left."""
        self._closed = True
        self._there.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            self._there.get()
            with self._turn:
                if self._jobs:
                    self._do_next()
                elif self._closed:
                    return

    def _do_next(self) -> None:
        future, job = self._jobs.popleft()
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
