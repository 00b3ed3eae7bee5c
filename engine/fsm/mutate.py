"""Each row must be needed: drops one row at a time and runs the searches that take it.

A search that never takes a row does the same without it, so only those that do are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.fsm.explore import Explorer, Found
from engine.fsm.load import substituted
from engine.fsm.search import Search
from engine.fsm.spec import Row, Spec


@dataclass(frozen=True)
class Dropped:
    """The fate of one row: who noticed that it was gone, and how; nobody where `search` is None."""

    spec: Spec
    row: Row
    search: str | None
    text: str


def without(spec: Spec, row: Row) -> Spec:
    """The spec with this row taken out."""
    return replace(spec, rows=tuple(other for other in spec.rows if other.number != row.number))


def drop_rows(
    specs: Iterable[Spec], results: Sequence[tuple[Search, Found]], progress: Callable[[str], None]
) -> Iterator[Dropped]:
    """One verdict a row. `results` are the searches with the unchanged specs."""
    by_size = sorted(results, key=lambda result: result[1].states)
    for spec in specs:
        for row in spec.rows:
            takers = [one for one in by_size if (spec.name, row.number) in one[1].fired]
            progress(f"{spec.name} without {row.label()}: {len(takers)} searches")
            yield _drop(spec, row, takers)


def _drop(spec: Spec, row: Row, takers: list[tuple[Search, Found]]) -> Dropped:
    if not takers:
        return Dropped(spec, row, None, "no search takes it")
    with substituted(without(spec, row)):
        for search, found in takers:
            # Without its row a system may grow for ever: growing beyond reason is a difference too.
            result = Explorer(search, max_states=3 * found.states + 1000).run()
            if result.violation is not None:
                return Dropped(spec, row, search.name, result.violation.text)
    names = ", ".join(search.name for search, _ in takers)
    return Dropped(spec, row, None, f"taken by {names}, which hold without it as well")
