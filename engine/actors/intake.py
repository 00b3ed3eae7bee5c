"""How requests enter a rank and how they are ended from outside: limits, aborts, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.actors.requests import OWN_ROWS, Requests, ending
from engine.actors.schedule import URGENT, Graphs
from engine.actors.speculation import Speculation
from engine.config import PAGE_TOKENS
from engine.errors import ConfigError, DeadlinePassed, NotServing, QueueFull, RequestTooLong
from engine.memory.pages import pages_for
from engine.messages import ABORTED, FAILED, RequestFailed, Submit

CLIENT_GONE = 499
"""Status beside an abort from outside; nobody reads it where the client has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What one rank is built with; all but `rank` is equal on every rank.

    slots          requests of clients that hold pages at once, at most
    queued         requests of clients that wait, at most
    chunk_tokens   prompt tokens of one step, at most
    context_tokens prompt and output of one request, at most
    window_tokens  attention window
    full_pages, window_pages    of the two pools, the reserved page 0 included. What the server's own probe
                   has comes on top: ASIDE slots, and as many pages of each pool
    eos_ids        tokens that end a request
    watchdog_ms    silence of a peer or the device after which the rank is given up
    speculation    how it drafts; None: it doesn't
    """

    rank: int
    ranks: int
    slots: int
    queued: int
    chunk_tokens: int
    context_tokens: int
    window_tokens: int
    full_pages: int
    window_pages: int
    eos_ids: tuple[int, ...]
    watchdog_ms: int
    graphs: Graphs = field(default_factory=Graphs)
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.full_pages < 2 or self.window_pages < 3:
            raise ConfigError(
                f"{self.full_pages} full and {self.window_pages} window pages, but a rank needs 2 and 3: "
                "the reserved page, a full page, and the two window pages that one window touches"
            )
        if self.speculation is not None:
            # Two steps in flight may have gone two rounds beyond the position that is known.
            most = (PAGE_TOKENS + 2 - self.window_tokens) // 2 - 1
            if not 1 <= self.speculation.block <= most:
                raise ConfigError(
                    f"a block of {self.speculation.block} drafted tokens; with a window of "
                    f"{self.window_tokens} tokens and pages of {PAGE_TOKENS} it must be 1 to {most}"
                )


class Intake:
    """Accepts, refuses and aborts requests of one table.

    due  deadline by request id, on Tick's clock; None until the first tick after the request came
    """

    def __init__(self, setup: RankSetup, requests: Requests, tell: Callable[[RequestFailed], None]) -> None:
        self.requests = requests
        self.due: dict[int, float | None] = {}
        self._setup = setup
        self._tell = tell

    def enqueue(self, items: tuple[Submit, ...]) -> None:
        """The requests wait from now on; all are refused where the queue has no room for all (I3).

        A prompt that can never run is refused alone (I15). They are clients' or the server's own, not both.
        """
        r = self.requests
        own = items[0].priority >= URGENT
        waiting, room = self._own() if own else self._queue()
        if len(items) > room:
            limit = OWN_ROWS if own else self._setup.queued
            text = f"{waiting} requests wait, at most {limit} may; there is no room for {len(items)} more"
            self.refuse(items, QueueFull.http_status, text)
            return
        for item in items:
            fault = self._too_long(item, own)
            if fault:
                self.refuse((item,), RequestTooLong.http_status, fault)
                continue
            r.accept(item, self._setup.context_tokens)
            if item.deadline_s > 0:
                self.due[item.request_id] = None

    def _queue(self) -> tuple[int, int]:
        """(clients' requests that wait, how many more may come): as many as there are rows for."""
        r = self.requests
        waiting = r.clients("waiting").size + r.clients("pending").size
        # A request that a free slot is for doesn't queue: the next plan admits it.
        return waiting, self._setup.queued + len(r.held.free_slots) - waiting

    def _own(self) -> tuple[int, int]:
        """As `_queue`, of the server's own."""
        r = self.requests
        live = sum(r.own(group).size for group in ("pending", "waiting", "active", "ending"))
        return r.own("waiting").size, OWN_ROWS - live

    def _too_long(self, item: Submit, own: bool) -> str:
        """Why a request can never run; empty where it can."""
        tokens = len(item.prompt) // 4
        most, pages = self._setup.context_tokens - 1, self.requests.held.full.usable
        if own and item.sampling.max_new_tokens != 1:
            wanted = item.sampling.max_new_tokens
            return f"the server's own probe wants {wanted} tokens, but has one step, which gives one"
        if own:
            most = min(most, PAGE_TOKENS)  # The one page that is set aside.
        if not 0 < tokens <= most:
            return f"the prompt has {tokens} tokens, but must have 1 to {most}"
        if pages_for(tokens) > pages:
            return f"the prompt of {tokens} tokens needs {pages_for(tokens)} pages, but the cache has {pages}"
        return ""

    def refuse(self, items: tuple[Submit, ...], status: int, text: str) -> None:
        """The terminal event of requests that were never accepted."""
        for item in items:
            self._tell(RequestFailed(item.request_id, FAILED, status, text))

    def abort(self, request_id: int, reason: int, status: int, text: str) -> None:
        """Ends the request; one that the rank has forgotten, or never had, is nobody's loss."""
        self.due.pop(request_id, None)
        row = self.requests.row_of.get(request_id)
        if row is not None:
            self.requests.end("Abort", row, ending(reason, status, text))

    def abort_all(self) -> None:
        """Every request gets its terminal event: the rank is stopping."""
        for group in ("pending", "waiting", "active"):
            for row in self.requests.rows(group).tolist():
                request_id = self.requests.submit_of(row).request_id
                self.abort(request_id, ABORTED, NotServing.http_status, "the server is stopping")

    def check_deadlines(self, now_s: float) -> None:
        """Aborts what is over its time. A deadline counts from the first tick after the request came."""
        for request_id, due_s in list(self.due.items()):
            if self.requests.is_over(request_id):
                del self.due[request_id]
                continue
            allowed_s = self.requests.submit_of(self.requests.row_of[request_id]).deadline_s
            if due_s is None:
                self.due[request_id] = now_s + allowed_s
            elif now_s >= due_s:
                text = f"the request wasn't done within its deadline of {allowed_s} s"
                self.abort(request_id, ABORTED, DeadlinePassed.http_status, text)

    def snapshot(self) -> Any:
        """What changes, for the search."""
        return tuple(self.due.items())

    def restore(self, taken: Any) -> None:
        """Back to a snapshot."""
        self.due = dict(taken)
