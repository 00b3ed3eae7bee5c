"""Each row must be needed in each of its states: drops one at a time and runs the searches that take it.

A search that never takes a row in a state does the same without it, so only those that do are run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.fsm.explore import Explorer, Found
from engine.fsm.load import substituted
from engine.fsm.search import Search
from engine.fsm.spec import Row, Spec
from engine.fsm.table import Taken


@dataclass(frozen=True)
class Dropped:
    """What came of one row's loss in one state: who noticed it, and how; nobody where `search` is None."""

    spec: Spec
    row: Row
    state: str
    search: str | None
    text: str

    def label(self) -> str:
        """How reports name it."""
        return f"{self.row.label()} in {self.state}" if len(self.row.states) > 1 else self.row.label()


def without(spec: Spec, row: Row, state: str) -> Spec:
    """The spec in which this row doesn't answer in this state."""
    states = tuple(other for other in row.states if other != state)
    return replace(spec, rows=tuple(replace(row, states=states) if one is row else one for one in spec.rows))


def drop_rows(
    specs: Iterable[Spec], results: Sequence[tuple[Search, Found]], progress: Callable[[str], None]
) -> Iterator[Dropped]:
    """One verdict a row and state. `results` are the searches with the unchanged specs."""
    by_size = sorted(results, key=lambda result: result[1].states)
    for spec in specs:
        for row in spec.rows:
            for state in row.states:
                takers = [one for one in by_size if Taken(spec.name, state, row.number) in one[1].fired]
                progress(f"{spec.name} without {row.label()} in {state}: {len(takers)} searches")
                yield _drop(spec, row, state, takers)


def _drop(spec: Spec, row: Row, state: str, takers: list[tuple[Search, Found]]) -> Dropped:
    if not takers:
        return Dropped(spec, row, state, None, "no search takes it")
    with substituted(without(spec, row, state)):
        for search, found in takers:
            # Without its row a system may grow for ever: growing beyond reason is a difference too.
            result = Explorer(search, max_states=3 * found.states + 1000).run()
            if result.violation is not None:
                return Dropped(spec, row, state, search.name, result.violation.text)
    names = ", ".join(search.name for search, _ in takers)
    return Dropped(spec, row, state, None, f"taken by {names}, which hold without it as well")
