"""The memory cache against a plain model of it, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.grammar.cache import ENTRY_BYTES, GrammarCache

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "read", "release"]), st.sampled_from("abcdef"), st.integers(0, 3000)),
    max_size=60,
)


@given(steps=STEPS, limit_entries=st.integers(1, 4), limit_kb=st.integers(2, 12))
def test_limits_hold_and_what_is_read_stays(
    steps: list[tuple[str, str, int]], limit_entries: int, limit_kb: int
) -> None:
    cache = GrammarCache(limit_kb << 10, limit_entries)
    held: dict[str, int] = {}
    order: list[str] = []
    for act, key, size in steps:
        if act == "put" and key not in cache:
            before, pinned = list(order), {one for one in held if held[one]}
            kept, gone = cache.put(key, f"value of {key}", size, 0)
            dropped = [one for one, _ in gone]
            assert not pinned & set(dropped)
            # The oldest that nobody reads went, and nothing more than needed.
            assert dropped == [one for one in before if one not in pinned][: len(dropped)]
            order = [one for one in order if one not in dropped] + [key] * kept
            if not kept:
                assert dropped == []
        elif act == "read" and key in cache:
            assert cache.read(key) == f"value of {key}"
            held[key] = held.get(key, 0) + 1
            order.remove(key)
            order.append(key)
        elif act == "release" and held.get(key):
            cache.release(key)
            held[key] -= 1
        assert cache.is_sound()
        assert list(cache.keys) == order
        assert all(cache.readers(one) == held.get(one, 0) for one in order)


def test_what_is_larger_than_the_limit_is_not_kept_and_drops_nothing() -> None:
    cache = GrammarCache(3 * ENTRY_BYTES, 10)
    assert cache.put("a", 1, 0, 0) == (True, ())
    assert cache.put("b", 2, 3 * ENTRY_BYTES, 0) == (False, ())
    assert cache.keys == ("a",)


def test_a_reader_that_isn_t_there_can_t_leave() -> None:
    cache = GrammarCache(1 << 20, 10)
    cache.put("a", 1, 0, 1)
    cache.release("a")
    with pytest.raises(ValueError, match="no reader"):
        cache.release("a")
