"""How much all automata of one request may take to build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from engine.grammar.gate.refusals import GrammarRefused

MAX_WORK = 200_000
"""Steps that all automata of one request may take to build: a second or two of a processor."""

_work: ContextVar[list[int] | None] = ContextVar("work", default=None)


@contextmanager
def bounded_work() -> Iterator[None]:
    """Within it, automata are built for MAX_WORK steps; then GrammarRefused, as for references too deep."""
    token = _work.set([MAX_WORK])
    try:
        yield
    except RecursionError as error:
        raise GrammarRefused("references or branches are nested too deeply") from error
    finally:
        _work.reset(token)


def spend(steps: int) -> None:
    """Takes steps from what the request may need. Raises GrammarRefused where there are none left."""
    left = _work.get()
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise GrammarRefused(f"its patterns and numbers need automata of more than {MAX_WORK} steps")
