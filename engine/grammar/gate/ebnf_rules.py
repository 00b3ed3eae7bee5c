"""Rules of a client's grammar: what makes them endless, ambiguous or empty is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.grammar.gate.refusals import GrammarRefused


@dataclass(frozen=True, slots=True)
class Atom:
    """A string or a class; `nullable` for the empty string."""

    nullable: bool


@dataclass(frozen=True, slots=True)
class Ref:
    """Another rule, by name."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Group:
    """Alternatives of sequences, `low` to `high` times (None: without end)."""

    options: tuple[tuple[Part, ...], ...]
    low: int
    high: int | None


Part = Atom | Ref | Group


def check_rules(rules: dict[str, Group]) -> None:
    """Refuse undefined rules, rules that never end, left recursion and endless repetition inside another."""
    for name, group in rules.items():
        for ref in refs_of(group):
            if ref.name not in rules:
                raise GrammarRefused(f"the rule {ref.name!r}, used by {name!r}, is not defined")
    nullable = _fixpoint(rules, _nullable)
    productive = _fixpoint(rules, _productive)
    bare = _fixpoint(rules, lambda part, names: _bare(part, names, nullable))
    for name, group in rules.items():
        if name not in productive:
            raise GrammarRefused(f"the rule {name!r} never ends")
        for inner in _groups(group):
            if inner.high is None and any(_bare_option(one, bare, nullable) for one in inner.options):
                raise GrammarRefused(f"endless repetition of an endless item in the rule {name!r}")
    _refuse_left_recursion(rules, nullable)


def refs_of(part: Part) -> Iterable[Ref]:
    """Every reference in a part."""
    todo = [part]
    while todo:
        one = todo.pop()
        if isinstance(one, Ref):
            yield one
        elif isinstance(one, Group):
            todo += [inner for option in one.options for inner in option]


def _groups(part: Part) -> Iterable[Group]:
    todo = [part]
    while todo:
        one = todo.pop()
        if isinstance(one, Group):
            yield one
            todo += [inner for option in one.options for inner in option]


def _fixpoint(rules: dict[str, Group], holds: Callable[[Part, set[str]], bool]) -> set[str]:
    found: set[str] = set()
    while True:
        more = {name for name, group in rules.items() if name not in found and holds(group, found)}
        if not more:
            return found
        found |= more


def _nullable(part: Part, names: set[str]) -> bool:
    if isinstance(part, Atom):
        return part.nullable
    if isinstance(part, Ref):
        return part.name in names
    return part.low == 0 or any(all(_nullable(one, names) for one in option) for option in part.options)


def _productive(part: Part, names: set[str]) -> bool:
    if isinstance(part, Atom):
        return True
    if isinstance(part, Ref):
        return part.name in names
    return part.low == 0 or any(all(_productive(one, names) for one in option) for option in part.options)


def _bare(part: Part, names: set[str], nullable: set[str]) -> bool:
    """Whether a part may be nothing but an endless repetition: repeating that takes cubic time to match."""
    if isinstance(part, Group):
        return part.high is None or any(_bare_option(one, names, nullable) for one in part.options)
    return isinstance(part, Ref) and part.name in names


def _bare_option(option: tuple[Part, ...], names: set[str], nullable: set[str]) -> bool:
    return any(
        _bare(part, names, nullable)
        and all(_nullable(other, nullable) for place, other in enumerate(option) if place != at)
        for at, part in enumerate(option)
    )


def _refuse_left_recursion(rules: dict[str, Group], nullable: set[str]) -> None:
    first = {name: set(_leading(group, nullable)) for name, group in rules.items()}
    for name in rules:
        seen: set[str] = set()
        todo = list(first[name])
        while todo:
            one = todo.pop()
            if one == name:
                raise GrammarRefused(
                    f"the rule {name!r} begins with itself; write the repetition with * or +"
                )
            if one not in seen:
                seen.add(one)
                todo += first[one]


def _leading(part: Part, nullable: set[str]) -> Iterable[str]:
    """Rules that a part may begin with."""
    if isinstance(part, Ref):
        yield part.name
    elif isinstance(part, Group):
        for option in part.options:
            for one in option:
                yield from _leading(one, nullable)
                if not _nullable(one, nullable):
                    break
