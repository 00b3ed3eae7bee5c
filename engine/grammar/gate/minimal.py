"""The smallest automaton of a language: equal states merged, those that can't accept dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.grammar.gate.work import spend

Row = tuple[tuple[int, int, int], ...]
"""(first, last, target) of one state, sorted; a character in no range leads nowhere."""

Entries = list[list[tuple[int, int, int]]]


def minimal(rows: Entries, accepting: Sequence[bool]) -> tuple[tuple[Row, ...], tuple[bool, ...]]:
    """(rows, accepting) of the smallest automaton with the same start, state 0."""
    before: list[list[int]] = [[] for _ in rows]
    for source, row in enumerate(rows):
        for _, _, target in row:
            before[target].append(source)
    # Equal states are equally far from an end.
    classes = _distances(before, accepting)
    rows = [[entry for entry in row if classes[entry[2]] >= 0] for row in rows]
    _refine(rows, classes, before)
    order = {classes[0]: 0}
    members = [0]
    for member in members:
        for _, _, target in rows[member]:
            if classes[target] not in order:
                order[classes[target]] = len(members)
                members.append(target)
    named = [order.get(one, 0) for one in classes]
    return tuple(_joined(rows[m], named) for m in members), tuple(accepting[m] for m in members)


def _refine(rows: Entries, classes: list[int], before: list[list[int]]) -> None:
    """Splits classes until equal states alone share one. Only states that lead to a new class are looked at.

    In each split the largest part keeps its name, so a state changes its class a few times: Hopcroft's
    argument. All of a class agreed when they were last looked at; who leads to no new class still does.
    """
    kept: dict[int, set[int]] = {}
    for state, one in enumerate(classes):
        if one >= 0:
            kept.setdefault(one, set()).add(state)
    touched: Iterable[int] = [state for state, one in enumerate(classes) if one >= 0]
    named = len(rows)
    while touched:
        parts: dict[int, dict[Row, list[int]]] = {}
        looked_at = 0
        for state in touched:
            parts.setdefault(classes[state], {}).setdefault(_joined(rows[state], classes), []).append(state)
            looked_at += 1
        spend(looked_at // 2)
        moved: list[int] = []
        for one, found in parts.items():
            rest = kept[one].difference(*found.values())
            groups = sorted((*found.values(), rest), key=len)
            kept[one] = set(groups.pop())
            for group in filter(None, groups):
                named += 1
                kept[named] = set(group)
                moved += group
                for state in group:
                    classes[state] = named
        touched = {source for state in moved for source in before[state] if classes[source] >= 0}


def _distances(before: list[list[int]], accepting: Sequence[bool]) -> list[int]:
    """Characters from each state to the nearest end; -1 where there is none."""
    distances = [0 if flag else -1 for flag in accepting]
    todo = [i for i, flag in enumerate(accepting) if flag]
    for state in todo:
        for source in before[state]:
            if distances[source] < 0:
                distances[source] = distances[state] + 1
                todo.append(source)
    return distances


def _joined(row: Sequence[tuple[int, int, int]], classes: list[int]) -> Row:
    """The row with classes for targets, neighbours merged."""
    merged: list[tuple[int, int, int]] = []
    for low, high, target in sorted(row):
        if merged and merged[-1][2] == classes[target] and merged[-1][1] + 1 == low:
            merged[-1] = (merged[-1][0], high, classes[target])
        else:
            merged.append((low, high, classes[target]))
    return tuple(merged)
