"""What the clients counted, what they found wrong, and how it compares with the server's own counters."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from engine.soak.exposition import Figures
from engine.soak.http import Answer
from engine.soak.item import ROUTES, Item, Reply

KEPT = 25
"""Violations of one kind that are kept with their evidence; all are counted."""

FAILED = (408, 500, 503)
"""Statuses of requests that may have been accepted before they failed."""

LATE = b" requests wait, at most "
"""In the 429 of a rank. A slot may be held for a step longer than its request, which the front has counted as
accepted by then; the front's own 429 is of requests that nobody counted.
"""

UNKNOWN_PROMPT = 4000
"""Tokens that no text prompt of the plan reaches."""

UNREAD = ("200", "429")
"""Statuses of answers that may be on their way when their client leaves."""

LEFT = "499"
"""Status in the server's metrics of answers that nobody waited for."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. `at_s` since the start of the soak."""

    at_s: float
    wall: str
    what: str
    evidence: str


class Ledger:
    """Counts of a soak. Clients add; the watcher and the report read."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.sent: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.refused_busy = 0
        self.accepted = self.prompt_tokens = self.completion_tokens = 0
        self.left_completions = self.left_tokens = self.left_prompt_tokens = 0
        self.latencies_s: list[float] = []
        self.firsts_s: list[float] = []
        self.violations: list[Violation] = []
        self.violations_by_kind: Counter[str] = Counter()

    @property
    def requests(self) -> int:
        """All that were sent."""
        return sum(self.kinds.values())

    @property
    def violation_count(self) -> int:
        """All of them."""
        return self.violations_by_kind.total()

    def violate(self, what: str, evidence: str) -> None:
        """Notes a violation, and says it at once: nobody should wait an hour for it."""
        self.violations_by_kind[what] += 1
        if self.violations_by_kind[what] <= KEPT:
            wall = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            self.violations.append(
                Violation(round(time.monotonic() - self.began_s, 2), wall, what, evidence[:2000])
            )
            print(f"soak: VIOLATION: {what}: {evidence[:300]}", file=sys.stderr, flush=True)

    def note(self, item: Item, answer: Answer, reply: Reply | None) -> None:
        """A request has ended, one way or another."""
        self.kinds[item.kind] += 1
        self.sent[item.path] += 1
        if answer.left:
            self.left[item.path] += 1
            self.left_completions += item.completions
            self.left_tokens += item.limit * item.completions
            prompt = item.body.get("prompt", "") if isinstance(item.body, dict) else ""
            self.left_prompt_tokens += len(prompt) if isinstance(prompt, list) else UNKNOWN_PROMPT
            return
        self.statuses[item.path, answer.status] += 1
        late = answer.status == 429 and LATE in answer.body
        if answer.status in FAILED or late or (answer.status == 200 and reply is None):
            # Whether it was accepted before it failed can't be seen from here, nor what it had got by then.
            self.left_completions += item.completions
            self.left_tokens += item.limit * item.completions
            self.left_prompt_tokens += UNKNOWN_PROMPT
        self.refused_busy += answer.status == 429
        if reply is not None:
            self.accepted += len(reply.choices)
            self.prompt_tokens += reply.prompt_tokens
            self.completion_tokens += reply.completion_tokens
            self.latencies_s.append(answer.whole_s)
            if item.streamed:
                self.firsts_s.append(answer.first_s)

    def compare(self, before: Figures, now: Figures) -> list[str]:
        """Where the server counted otherwise than the clients, who were its only ones. Nothing runs."""
        faults = []

        def within(name: str, value: float, low: float, high: float) -> None:
            if not low <= value <= high:
                faults.append(f"{name}: the server counted {value:g}, the clients {low:g} to {high:g}")

        def grown(name: str) -> float:
            return now.total(name) - before.total(name)

        within(
            "completions", grown("num_requests_total"), self.accepted, self.accepted + self.left_completions
        )
        within(
            "output tokens", grown("generation_tokens_total"),
            self.completion_tokens, self.completion_tokens + self.left_tokens,
        )  # fmt: skip
        within(
            "prompt tokens", grown("prompt_tokens_total"),
            self.prompt_tokens, self.prompt_tokens + self.left_prompt_tokens,
        )  # fmt: skip
        within("aborted completions", grown("num_aborted_requests_total"), 0, self.left_completions)
        for route in ROUTES:
            old, new = before.by_status(route), now.by_status(route)
            left = self.left[route]
            for status in sorted(set(new) - {LEFT}):
                count = self.statuses[route, int(status)]
                most = count + (left if status in UNREAD else 0)
                within(f"{route} {status}", new[status] - old.get(status, 0.0), count, most)
            within(f"{route} {LEFT}", new.get(LEFT, 0.0) - old.get(LEFT, 0.0), 0, left)
        return faults

    def counts(self) -> dict[str, Any]:
        """For the report."""
        return {
            "requests": self.requests,
            "requests_by_kind": dict(sorted(self.kinds.items())),
            "answers_by_status": {
                str(status): sum(count for (_, one), count in self.statuses.items() if one == status)
                for status in sorted({status for _, status in self.statuses})
            },
            "disconnects": sum(self.left.values()),
            "bad_requests": self.kinds["bad"],
            "queue_full": self.refused_busy,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.completion_tokens,
            "violations": self.violation_count,
            "violations_by_kind": dict(sorted(self.violations_by_kind.items())),
            "violation_list": [asdict(one) for one in self.violations],
        }
