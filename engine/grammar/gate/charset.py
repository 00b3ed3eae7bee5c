"""Sets of characters as sorted, disjoint, inclusive ranges of code points. Surrogates belong to no set."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
ALL: Ranges = ((0, 0xD7FF), (0xE000, LAST))
NONE: Ranges = ()


def normal(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted and merged, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        elif low <= high:
            merged.append((low, high))
    return intersect(tuple(merged), ALL)


def intersect(left: Ranges, right: Ranges) -> Ranges:
    """Characters of both; both sorted and disjoint."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            found.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Every other character."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        gaps.append((start, LAST))
    return intersect(tuple(gaps), ALL)


def union(*sets: Ranges) -> Ranges:
    """Characters of any."""
    return normal(pair for ranges in sets for pair in ranges)


def minus(left: Ranges, right: Ranges) -> Ranges:
    """Characters of the left set alone."""
    return intersect(left, complement(right))


def of(text: str) -> Ranges:
    """The characters of a text."""
    return normal((ord(character), ord(character)) for character in text)


DIGIT = of("0123456789")
WORD = normal(((48, 57), (65, 90), (95, 95), (97, 122)))
SPACE = normal(
    ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
    + ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))
)
LINE_END = of("\n\r\u2028\u2029")
