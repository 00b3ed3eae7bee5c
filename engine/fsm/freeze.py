"""Values of cores turned into hashable ones and back, for the search.

Lists, dicts (in their order), sets, deques, arrays and plain objects are copied in depth; whatever is
hashable and none of these is kept as it is. Two references to one object become two objects.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

ATOMS = (type(None), bool, int, float, str, bytes)


class Frozen(tuple[Any, ...]):
    """A frozen container: (how to build it again, contents). Its own type keeps it apart from data tuples."""

    __slots__ = ()


def freeze(value: Any) -> Any:
    """A hashable equal for equal values of the same types.

    raises  TypeError for an object that has a snapshot of its own: it is a field in DATA, or not at all
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is tuple:
        return tuple([freeze(item) for item in value])
    if kind is list:
        return Frozen((kind, tuple([freeze(item) for item in value])))
    if kind is deque:
        return Frozen((kind, tuple([freeze(item) for item in value]), value.maxlen))
    if kind in (set, frozenset):
        return Frozen((kind, frozenset([freeze(item) for item in value])))
    if isinstance(value, dict):
        items = tuple([(freeze(key), freeze(item)) for key, item in value.items()])
        return Frozen((kind, items, getattr(value, "default_factory", None)))
    if isinstance(value, np.ndarray):
        return Frozen((np.ndarray, value.tobytes(), value.dtype.str, value.shape))
    if hasattr(value, "snapshot") and hasattr(value, "restore"):
        raise TypeError(
            f"{kind.__name__} has its own snapshot: it must be a field in DATA, not inside another"
        )
    if _hashes_by_value(value):
        return value
    if isinstance(value, tuple):
        return Frozen((kind, tuple([freeze(item) for item in value])))
    return Frozen((kind, tuple([(name, freeze(getattr(value, name))) for name in _fields(value)])))


def thaw(frozen: Any) -> Any:
    """A fresh value equal to the one that was frozen."""
    kind = type(frozen)
    if kind is tuple:
        return tuple([thaw(item) for item in frozen])
    if kind is not Frozen:
        return frozen
    build, contents, *how = frozen
    if build in (list, set, frozenset):
        return build([thaw(item) for item in contents])
    if build is deque:
        return deque([thaw(item) for item in contents], *how)
    if issubclass(build, dict):
        made = defaultdict(*how) if build is defaultdict else build()
        made.update({thaw(key): thaw(item) for key, item in contents})
        return made
    if build is np.ndarray:
        dtype, shape = how
        return np.frombuffer(contents, dtype=dtype).reshape(shape).copy()
    if issubclass(build, tuple):
        return build(*[thaw(item) for item in contents])
    return _rebuilt(build, [(name, thaw(item)) for name, item in contents])


def _rebuilt(build: type[Any], fields: list[tuple[str, Any]]) -> Any:
    if issubclass(build, msgspec.Struct):
        return build(**dict(fields))
    value: Any = object.__new__(build)
    for name, item in fields:
        object.__setattr__(value, name, item)  # Past the guard of a frozen dataclass.
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
    if isinstance(value, msgspec.Struct):
        yield from value.__struct_fields__
        return
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name
    yield from getattr(value, "__dict__", ())
