"""How much all automata of one request may take to build, and what of it is remembered: nothing of others'.

A memory that outlives a request would let clients fill it, and answers would depend on who asked before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from engine.grammar.gate.refusals import GrammarRefused

MAX_WORK = 200_000
"""Steps that all automata of one request may take to build: a second or two of a processor."""

P = ParamSpec("P")
R = TypeVar("R")

_work: ContextVar[list[int] | None] = ContextVar("work", default=None)
_known: ContextVar[dict[Any, Any] | None] = ContextVar("known", default=None)


@contextmanager
def bounded_work() -> Iterator[None]:
    """Within it, automata are built for MAX_WORK steps; then GrammarRefused, as for references too deep."""
    token, known = _work.set([MAX_WORK]), _known.set({})
    try:
        yield
    except RecursionError as error:
        raise GrammarRefused("references or branches are nested too deeply") from error
    finally:
        _work.reset(token)
        _known.reset(known)


def spend(steps: int) -> None:
    """Takes steps from what the request may need. Raises GrammarRefused where there are none left."""
    left = _work.get()
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise GrammarRefused(f"its patterns and numbers need automata of more than {MAX_WORK} steps")


def once_a_request(function: Callable[P, R]) -> Callable[P, R]:
    """Remembers what a function of hashable arguments gives, for as long as the request is being read."""

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> R:
        known = _known.get()
        if known is None:
            return function(*args, **kwargs)
        key = (function, args, tuple(kwargs.items()))
        if key not in known:
            known[key] = function(*args, **kwargs)
        found: R = known[key]
        return found

    return remembered
