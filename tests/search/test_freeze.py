"""What a search freezes comes back as it was, and nothing of it is shared."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fsm.freeze import freeze, thaw

ATOMS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(deque)
        | st.dictionaries(st.integers(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=12,
)


class Pair(NamedTuple):
    """A tuple with a list in it."""

    name: str
    items: list[int]


@dataclass(frozen=True, slots=True)
class Point:
    """A frozen dataclass that isn't hashable."""

    at: list[int]


class Plain:
    """An object with slots and a field of its own class."""

    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class Struct(msgspec.Struct, frozen=True):
    """A message that isn't hashable."""

    counters: dict[str, float]


@given(VALUES)
def test_values_come_back_equal_and_hash_alike(value: Any) -> None:
    frozen = freeze(value)
    assert thaw(frozen) == value
    assert hash(frozen) == hash(freeze(thaw(frozen)))
    assert frozen == freeze(thaw(frozen))


@pytest.mark.parametrize(
    "value",
    [
        Pair("a", [1]),
        Point([1, 2]),
        Struct({"a": 1.0}),
        OrderedDict(b=1, a=2),
        Counter("aab"),
        defaultdict(list, {1: [2]}),
        deque([1, 2], maxlen=2),
        {"a": {1: deque([Pair("b", [])])}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_kind_of_container_comes_back_as_its_own_kind(value: Any) -> None:
    back = thaw(freeze(value))
    assert back == value
    assert type(back) is type(value)
    assert getattr(back, "maxlen", 0) == getattr(value, "maxlen", 0)
    assert getattr(back, "default_factory", 0) == getattr(value, "default_factory", 0)
    hash(freeze(value))


def test_arrays_and_plain_objects_come_back() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    back = thaw(freeze(Plain([array], Plain(None, {1}))))
    assert np.array_equal(back.left[0], array)
    assert back.left[0].dtype == array.dtype
    assert back.right.right == {1}
    back.left[0][0, 0] = 9
    assert array[0, 0] == 0


def test_nothing_is_shared_with_what_was_frozen() -> None:
    inner = [1]
    frozen = freeze({"a": inner})
    inner.append(2)
    first = thaw(frozen)
    first["a"].append(3)
    assert thaw(frozen) == {"a": [1]}


def test_order_of_a_dict_makes_a_difference_and_that_of_a_set_none() -> None:
    assert freeze({1: 1, 2: 2}) != freeze({2: 2, 1: 1})
    assert freeze({1, 2}) == freeze({2, 1})
    assert freeze([1]) != freeze((1,))
