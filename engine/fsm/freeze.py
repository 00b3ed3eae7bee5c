"""Values of cores turned into hashable ones and back, for the search.

Lists, dicts (in their order), sets, deques, arrays and plain objects are copied in depth; whatever is
hashable and none of these is kept as it is. Two references to one object become two objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

ATOMS = (type(None), bool, int, float, str, bytes)


class Frozen(tuple[Any, ...]):
    """A frozen container: (how to build it again, contents). Its own type keeps it apart from data tuples."""

    __slots__ = ()


def freeze(value: Any) -> Any:
    """A hashable equal for equal values of the same types."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([freeze(item) for item in value])
    if kind in (list, deque):
        return Frozen((kind, tuple([freeze(item) for item in value])))
    if kind in (set, frozenset):
        return Frozen((kind, frozenset([freeze(item) for item in value])))
    if isinstance(value, dict):
        return Frozen((kind, tuple([(freeze(key), freeze(item)) for key, item in value.items()])))
    if isinstance(value, np.ndarray):
        return Frozen((np.ndarray, (value.dtype.str, value.shape, value.tobytes())))
    if hasattr(value, "snapshot") and hasattr(value, "restore"):
        raise TypeError(
            f"{kind.__name__} has its own snapshot: it must be a field in DATA, not inside another"
        )
    if _hashes_by_value(value):
        return value
    return Frozen((kind, tuple((name, freeze(getattr(value, name))) for name in _fields(value))))


def thaw(frozen: Any) -> Any:
    """A fresh value equal to the one that was frozen."""
    kind = type(frozen)
    if kind is tuple:
        return tuple([thaw(item) for item in frozen])
    if kind is not Frozen:
        return frozen
    build, contents = frozen
    if build in (list, deque, set, frozenset):
        return build([thaw(item) for item in contents])
    if issubclass(build, dict):
        made = build()
        made.update((thaw(key), thaw(item)) for key, item in contents)
        return made
    if build is np.ndarray:
        dtype, shape, data = contents
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    value = build.__new__(build)
    for name, item in contents:
        object.__setattr__(value, name, thaw(item))
    return value


def _hashes_by_value(value: Any) -> bool:
    inherited: Any = object.__hash__
    if type(value).__hash__ is inherited:
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _fields(value: Any) -> Iterator[str]:
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name
    yield from getattr(value, "__dict__", ())
