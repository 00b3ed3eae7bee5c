"""What a rank's process measures around its scheduler: waits, stages, idleness, work; no decision reads it.

The scheduler has no clock. This stands at its doors: what arrives for it, what it gives to the device, what
the device answers, and what it sends on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.actors.core import Effect
from engine.messages import (
    Abort,
    Message,
    Peer,
    RequestFailed,
    RunStep,
    StepDone,
    StepOut,
    SubmitBatch,
    Tick,
)
from engine.metrics_buckets import Buckets, key_of
from engine.metrics_tables import HISTOGRAMS, PHASES, STAGES

LOG = logging.getLogger("engine.rank")

FAULT = 500
"""HTTP status of requests that failed by a fault of the rank."""

WINDOW_S = 30.0
"""The longest piece of work is that of one to two such windows."""

PHASE_OF: dict[type, str] = {
    SubmitBatch: "submit",
    Abort: "abort",
    Peer: "peer",
    StepDone: "results",
    Tick: "tick",
}

Receive = Callable[[Any], list[Effect]]


class Work:
    """Calls of the scheduler by phase: seconds, calls, and the longest of the last one to two windows."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.calls = dict.fromkeys(PHASES, 0)
        self._now_s = now_s
        self._longest = dict.fromkeys(PHASES, 0.0)
        self._before = dict(self._longest)
        self._turned_s = now_s()

    def timed(self, receive: Receive) -> Receive:
        """The scheduler's `receive`, timed."""
        now_s, seconds, calls = self._now_s, self.seconds, self.calls

        def work(msg: Any) -> list[Effect]:
            phase = PHASE_OF.get(type(msg), "other")
            began_s = now_s()
            effects = receive(msg)
            spent_s = now_s() - began_s
            seconds[phase] += spent_s
            calls[phase] += 1
            if spent_s > self._longest[phase]:
                self._longest[phase] = spent_s
            return effects

        return work

    def figures(self) -> dict[str, float]:
        """All figures by name, as in Ledger."""
        found: dict[str, float] = {}
        for phase in PHASES:
            longest = max(self._longest[phase], self._before[phase])
            found[key_of("scheduler_phase_seconds_total", {"phase": phase})] = self.seconds[phase]
            found[key_of("scheduler_phase_calls_total", {"phase": phase})] = self.calls[phase]
            found[key_of("scheduler_phase_max_seconds", {"phase": phase})] = longest
        now_s = self._now_s()
        if now_s - self._turned_s >= WINDOW_S:
            self._turned_s, self._before = now_s, self._longest
            self._longest = dict.fromkeys(PHASES, 0.0)
        return found


class Steps:
    """Steps of this rank and of the group, by what they carried."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tokens = Buckets("iteration_tokens", HISTOGRAMS["iteration_tokens"].bounds)
        name = "dp_attention_token_imbalance_ratio"
        self._imbalance = Buckets(name, HISTOGRAMS[name].bounds)
        self._scheduled = self._group = self._busy = self._idle = 0

    def note(self, job: RunStep) -> None:
        """A step goes to the device."""
        shares = [tokens for _, tokens, _ in job.ranks] or [len(job.tokens) // 4]
        own, group = shares[self._rank if job.ranks else 0], sum(shares)
        self._scheduled += own
        self._group += group
        self._busy += own > 0
        self._idle += own == 0
        if own:
            self._tokens.observe(own)
        if group and len(shares) > 1:
            self._imbalance.observe(max(shares) * len(shares) / group)

    def figures(self) -> dict[str, float]:
        """All figures by name, as in Ledger."""
        return {
            key_of("dp_attention_tokens_total", {"kind": "scheduled"}): self._scheduled,
            key_of("dp_attention_tokens_total", {"kind": "group"}): self._group,
            key_of("dp_attention_steps_total", {"rank_state": "busy"}): self._busy,
            key_of("dp_attention_steps_total", {"rank_state": "idle"}): self._idle,
            **self._tokens.figures(),
            **self._imbalance.figures(),
        }


class Stages:
    """Where requests are, and how long each stage took."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        # Request id -> since when.
        self._since: dict[str, dict[int, float]] = {stage: {} for stage in STAGES}
        self._queue = Buckets("queue_time_seconds", HISTOGRAMS["queue_time_seconds"].bounds)
        name = "per_stage_req_latency_seconds"
        self._spent = {
            stage: Buckets(name, HISTOGRAMS[name].bounds, {"stage": stage}) for stage in self._since
        }

    def arrived(self, msg: Message) -> Message:
        """On its way to the scheduler's mailbox."""
        if isinstance(msg, SubmitBatch):
            now_s = self._now_s()
            self._since["queue"].update((item.request_id, now_s) for item in msg.items)
        return msg

    def bound(self, job: RunStep) -> None:
        """Requests have their slot. A retracted one that gets another doesn't count again."""
        for bind in job.binds:
            spent_s = self._pass_on("queue", bind.request_id, "prefill")
            if spent_s is not None:
                self._queue.observe(spent_s)
                self._since["inference"][bind.request_id] = self._since["prefill"][bind.request_id]

    def sent(self, msg: Message) -> Message:
        """On its way to the detokenizer: first tokens and ends."""
        if isinstance(msg, RequestFailed):
            level = logging.WARNING if msg.status == FAULT else logging.DEBUG
            LOG.log(level, "ended: %s", msg.message, extra={"request": msg.request_id})
            self._drop(msg.request_id)
        elif isinstance(msg, StepOut):
            finish = np.frombuffer(msg.finish, np.uint8)
            if self._since["prefill"] or finish.any():
                self._note_out(msg, finish)
        return msg

    def _note_out(self, msg: StepOut, finish: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        ids = np.frombuffer(msg.request_ids, np.int64).tolist()
        for request_id, count, end in zip(ids, msg.counts, finish.tolist(), strict=True):
            if count:
                self._pass_on("prefill", request_id, "decode")
            if end:
                self._pass_on("decode", request_id, "")
                self._pass_on("inference", request_id, "")
                self._drop(request_id)

    def _pass_on(self, stage: str, request_id: int, to: str) -> float | None:
        """Ends a request's stage; its seconds, None where it isn't in it."""
        since_s = self._since[stage].pop(request_id, None)
        if since_s is None:
            return None
        now_s = self._now_s()
        self._spent[stage].observe(now_s - since_s)
        if to:
            self._since[to][request_id] = now_s
        return now_s - since_s

    def _drop(self, request_id: int) -> None:
        for waiting in self._since.values():
            waiting.pop(request_id, None)

    def figures(self) -> dict[str, float]:
        """All figures by name, as in Ledger."""
        found = self._queue.figures()
        for buckets in self._spent.values():
            found |= buckets.figures()
        return found
