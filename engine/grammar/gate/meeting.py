"""Values that two alternatives have in common."""

from __future__ import annotations

from typing import TypeVar

from engine.grammar.gate.alternatives import (
    Alternative,
    Arr,
    Bool,
    Null,
    Num,
    Obj,
    Seen,
    Str,
    both,
    holds_text,
)

Part = TypeVar("Part")


def meet(left: Alternative, right: Alternative) -> Alternative | None:
    """Values of both; None where it is plain that there are none."""
    if isinstance(left, Null) and isinstance(right, Null):
        return left
    if isinstance(left, Bool) and isinstance(right, Bool):
        values = tuple(value for value in left.values if value in right.values)
        return Bool(values) if values else None
    if isinstance(left, Num) and isinstance(right, Num):
        return _numbers(left, right)
    if isinstance(left, Str) and isinstance(right, Str):
        return _strings(left, right)
    if isinstance(left, Arr) and isinstance(right, Arr):
        return _arrays(left, right)
    if isinstance(left, Obj) and isinstance(right, Obj):
        return _objects(left, right)
    return None


def _join(left: tuple[Part, ...], right: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(dict.fromkeys((*left, *right)))


def smaller(left: int | None, right: int | None) -> int | None:
    """Of two upper limits, where None is no limit."""
    return right if left is None else left if right is None else min(left, right)


def _crossed(low: int, high: int | None) -> bool:
    return high is not None and low > high


def _numbers(left: Num, right: Num) -> Num | None:
    conditions = _join(left.conditions, right.conditions)
    chosen = left.chosen
    if chosen is None:
        chosen = right.chosen
    elif right.chosen is not None:
        values = {number.value for number in right.chosen}
        chosen = tuple(number for number in chosen if number.value in values)
    if chosen is not None:
        chosen = tuple(
            number
            for number in chosen
            if all(one.holds(number.value) == wanted for one, wanted in conditions)
        )
    return None if chosen == () else Num(conditions, chosen)


def _strings(left: Str, right: Str) -> Str | None:
    low, high = max(left.low, right.low), smaller(left.high, right.high)
    matches = _join(left.matches, right.matches)
    chosen = left.chosen if left.chosen is not None else right.chosen
    if chosen is not None:
        chosen = tuple(text for text in chosen if holds_text(left, text) and holds_text(right, text))
    return None if chosen == () or _crossed(low, high) else Str(matches, chosen, low, high)


def _arrays(left: Arr, right: Arr) -> Arr | None:
    low, high = max(left.low, right.low), smaller(left.high, right.high)
    seen = None if left.seen is None or right.seen is None else max(left.seen, right.seen)
    made = Arr(
        _join(left.items, right.items),
        _join(left.holds, right.holds),
        low,
        high,
        left.unique or right.unique,
        seen,
    )
    return None if _crossed(low, high) else made


def _objects(left: Obj, right: Obj) -> Obj | None:
    low, high = max(left.low, right.low), smaller(left.high, right.high)
    required = _join(left.required, right.required)
    seen = Seen(
        left.seen.names | right.seen.names,
        _join(left.seen.patterns, right.seen.patterns),
        left.seen.everything or right.seen.everything,
    )
    members, needs = _join(left.members, right.members), _join(left.needs, right.needs)
    made = Obj(members, required, both(left.keys, right.keys), low, high, needs, seen)
    return None if _crossed(max(low, len(required)), high) else made
