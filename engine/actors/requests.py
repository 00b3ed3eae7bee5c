"""The request table of a rank: one row a request, its life in specs/request.toml, its numbers in columns.

What a request holds is taken by `hold_slot` and `Holdings.take_pages` and given back by the rows that leave a
live state (`release`), never by a caller.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.actors.core import table_of
from engine.actors.holdings import Holdings
from engine.actors.schedule import URGENT, Column, Rows
from engine.errors import Unexpected
from engine.fsm.load import spec_named
from engine.fsm.vector import VectorMachine
from engine.memory.pages import PagePool
from engine.messages import ABORTED, FAILED, MatcherLeft, MatcherWanted, RequestFailed, Submit

Word = RequestFailed | MatcherWanted | MatcherLeft
"""What the table tells others."""

OWN_ROWS = 2
"""Of the server's own probe: one that has its place, and one that waits for that place."""

COLUMNS = (
    *("arrival", "priority", "passed", "in_flight", "due", "most_due", "planned", "feed_to", "known"),
    *("prompt", "ends_at", "least", "ignores_eos", "has_stops", "echoes", "echoed", "last_token", "reason"),
    "constrained",
)

GROUPS = {
    "vacant": ("free", "finished", "aborted", "failed"),
    "pending": ("pending",),
    "waiting": ("waiting", "retracted"),
    "active": ("prefill", "running"),
    "ending": ("finishing",),
}
"""States by what a request holds: nothing and no interest; nothing yet, in the line or not; a slot; a slot
until steps end."""


class Gained(NamedTuple):
    """What requests gained: tokens int32[n]; int64[B] where each one's begin, and how many they are."""

    tokens: NDArray[np.int32]
    firsts: Column
    counts: Column


class End(NamedTuple):
    """Why requests end: finish codes uint8[B] of the batch; status and text where they end by a message."""

    reasons: NDArray[np.uint8]
    status: int = 500
    text: str = ""


def ending(reason: int, status: int, text: str) -> End:
    """The end of one request."""
    return End(np.array([reason], np.uint8), status, text)


class Requests:
    """All requests of a rank. Columns are int64[capacity], by row:

    arrival, priority, passed    place in the line (see schedule.py)
    in_flight          steps that were planned with it and aren't committed
    due, most_due      tokens that those steps bring at least, unless it ends; and at most
    planned, feed_to   positions computed or in flight, with drafts at most; positions computed as prompt
    known, prompt      tokens on the host: prompt and output; the prompt's
    ends_at, least     tokens at its longest; tokens that come before EOS and stop tokens count
    echoes, echoed     wants prompt logprobs; prompt positions whose logprobs went out
    ignores_eos, has_stops, last_token, reason    as named; reason is a finish code
    constrained        has a grammar
    """

    MESSAGES: ClassVar[None] = None
    arrival: Column
    priority: Column
    passed: Column
    in_flight: Column
    due: Column
    most_due: Column
    planned: Column
    feed_to: Column
    known: Column
    prompt: Column
    ends_at: Column
    least: Column
    ignores_eos: Column
    has_stops: Column
    echoes: Column
    echoed: Column
    last_token: Column
    reason: Column
    constrained: Column

    def __init__(
        self, slots: int, queued: int, full: PagePool, window: PagePool, tell: Callable[[Word], None]
    ) -> None:
        capacity = slots + queued + OWN_ROWS
        self.held = Holdings(capacity, slots, full, window)
        self.machine = VectorMachine(table_of(spec_named("request")), self, capacity)
        self.row_of: dict[int, int] = {}
        self.submits: list[Submit | None] = [None] * capacity
        self.tokens = [array("i") for _ in range(capacity)]
        self.arrivals = 0
        self._tell = tell
        self._numbers = np.zeros((len(COLUMNS), capacity), np.int64)
        for index, name in enumerate(COLUMNS):
            setattr(self, name, self._numbers[index])
        states = self.machine.table.state_index
        self._events = self.machine.table.event_index
        self._masks = {
            group: np.isin(np.arange(len(states)), [states[name] for name in names])
            for group, names in GROUPS.items()
        }

    # -- which ---------------------------------------------------------------------------------

    def rows(self, group: str) -> Rows:
        """Rows in the states of this one of GROUPS, ascending."""
        return np.flatnonzero(self._masks[group][self.machine.states])

    def clients(self, group: str) -> Rows:
        """As `rows`, without the server's own probe, which shares nothing with them."""
        rows = self.rows(group)
        theirs: Rows = rows[self.priority[rows] < URGENT]
        return theirs

    def own(self, group: str) -> Rows:
        """As `rows`, the server's own probe alone, in the order of arrival."""
        rows = self.rows(group)
        rows = rows[self.priority[rows] >= URGENT]
        ordered: Rows = rows[np.argsort(self.arrival[rows])]
        return ordered

    def are(self, group: str, rows: Rows) -> NDArray[np.bool_]:
        """Which of these rows are in the states of this one of GROUPS."""
        found: NDArray[np.bool_] = self._masks[group][self.machine.states[rows]]
        return found

    def submit_of(self, row: int) -> Submit:
        """What the client asked for."""
        submit = self.submits[row]
        assert submit is not None
        return submit

    def is_over(self, request_id: int) -> bool:
        """Whether the request has ended and holds nothing, or was never accepted."""
        row = self.row_of.get(request_id)
        return row is None or bool(self.are("vacant", np.array([row]))[0])

    # -- events --------------------------------------------------------------------------------

    def fire(self, event: str, rows: Rows, msg: object = None) -> None:
        """One event for these rows, each at most once."""
        self.machine.fire(self._events[event], rows, msg)

    def accept(self, submit: Submit, context_tokens: int) -> None:
        """A row for this request, which waits from now on. The caller has seen that a row is vacant."""
        if not self.is_over(submit.request_id):
            raise Unexpected(f"request {submit.request_id} was submitted twice")
        row = int(self.rows("vacant")[0])
        before = self.submits[row]
        if before is not None:
            del self.row_of[before.request_id]
        sampling = submit.sampling
        self.row_of[submit.request_id] = row
        self.submits[row] = submit
        self.tokens[row] = tokens = array("i", submit.prompt)
        self._numbers[:, row] = 0
        self.known[row] = self.prompt[row] = len(tokens)
        self.ends_at[row] = min(len(tokens) + sampling.max_new_tokens, context_tokens)
        self.least[row] = len(tokens) + sampling.min_new_tokens
        self.ignores_eos[row] = sampling.ignore_eos
        self.has_stops[row] = bool(sampling.stop_token_ids)
        self.echoes[row] = sampling.prompt_logprobs >= 0
        self.constrained[row] = bool(submit.grammar)
        self.priority[row] = submit.priority
        self.arrival[row] = self.arrivals
        self.arrivals += 1
        self.fire("Accept", np.array([row]))

    def end(self, event: str, row: int, why: End) -> None:
        """Abort or Fail of one request; what it holds is free as soon as no step in flight reads it (I5)."""
        rows = np.array([row])
        self.fire(event, rows, why)
        self.settle(rows)

    def settle(self, rows: Rows) -> None:
        """Ends for good those of these rows that have ended and that no step in flight reads."""
        done = rows[self.are("ending", rows) & (self.in_flight[rows] == 0)]
        if done.size:
            self.fire("Settle", done)

    # -- guards and actions of specs/request.toml ----------------------------------------------

    def is_constrained(self, rows: Rows, msg: object) -> NDArray[np.bool_]:
        """It needs a matcher before it can be admitted."""
        return np.not_equal(self.constrained[rows], 0)

    def want_matcher(self, rows: Rows, at: Rows, msg: object) -> None:
        """Its grammar is loaded while others run."""
        for row in rows.tolist():
            submit = self.submit_of(row)
            wanted = (submit.grammar, submit.grammar_root, int(self.prompt[row]))
            self._tell(MatcherWanted(submit.request_id, *wanted))

    def leave_matcher(self, rows: Rows, at: Rows, msg: object) -> None:
        """No step in flight names it, and none will."""
        for row in rows[self.constrained[rows] != 0].tolist():
            self._tell(MatcherLeft(self.submit_of(row).request_id))

    def was_aborted(self, rows: Rows, msg: object) -> NDArray[np.bool_]:
        """It ended from outside."""
        return np.equal(self.reason[rows], ABORTED)

    def has_failed(self, rows: Rows, msg: object) -> NDArray[np.bool_]:
        """It ended by an error."""
        return np.equal(self.reason[rows], FAILED)

    def hold_slot(self, rows: Rows, at: Rows, msg: object) -> None:
        """A slot under a new generation; every token on the host is computed as prompt."""
        for row in rows.tolist():
            submit = self.submit_of(row)
            self.held.take_slot(row, submit.request_id, submit.priority >= URGENT)
        self.planned[rows] = 0
        self.feed_to[rows] = self.known[rows]

    def release(self, rows: Rows, at: Rows, msg: object) -> None:
        """Everything that these rows hold goes back (I10)."""
        self.held.release(rows)

    def keep_tokens(self, rows: Rows, at: Rows, msg: Gained) -> None:
        """The next tokens of each."""
        firsts, counts = msg.firsts[at], msg.counts[at]
        ends = firsts + counts
        last = self.last_token[rows] = msg.tokens[ends - 1]
        self.known[rows] += counts
        tokens = self.tokens
        if rows.size == counts.sum():  # One token each: the faster way.
            for row, token in zip(rows.tolist(), last.tolist(), strict=True):
                tokens[row].append(token)
            return
        data = msg.tokens.tobytes()
        for row, first, end in zip(rows.tolist(), (4 * firsts).tolist(), (4 * ends).tolist(), strict=True):
            tokens[row].frombytes(data[first:end])

    def note_end(self, rows: Rows, at: Rows, msg: End) -> None:
        """Remembers the finish code."""
        self.reason[rows] = msg.reasons[at]

    def tell_end(self, rows: Rows, at: Rows, msg: End) -> None:
        """The one terminal event of requests that don't end with a token (I11)."""
        for row, reason in zip(rows.tolist(), msg.reasons[at].tolist(), strict=True):
            self._tell(RequestFailed(self.submit_of(row).request_id, reason, msg.status, msg.text))

    def ends_agree(self) -> bool:
        """I11: `finished` and `failed` mean what the terminal event said."""
        reasons = [self.reason[self.machine.within(state)] for state in ("finished", "failed")]
        return not np.isin(reasons[0], (ABORTED, FAILED)).any() and bool((reasons[1] == FAILED).all())

    # -- for the search ------------------------------------------------------------------------

    def snapshot(self) -> tuple[Any, ...]:
        """All of it as a hashable."""
        return (
            self.machine.snapshot(),
            self.held.snapshot(),
            tuple(self.row_of.items()),
            tuple(self.submits),
            tuple([tokens.tobytes() for tokens in self.tokens]),
            self.arrivals,
            self._numbers.tobytes(),
        )

    def restore(self, taken: tuple[Any, ...]) -> None:
        """Back to a snapshot."""
        states, held, row_of, submits, tokens, self.arrivals, numbers = taken
        self.machine.restore(states)
        self.held.restore(held)
        self.row_of = dict(row_of)
        self.submits = list(submits)
        self.tokens = [array("i", data) for data in tokens]
        self._numbers[:] = np.frombuffer(numbers, np.int64).reshape(self._numbers.shape)
