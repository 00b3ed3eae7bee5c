"""What the searches of ranks share: small ranks, their devices, and monitors that watch from outside."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from engine.actors.core import Run, Send, Stop
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.actors.rank_checks import probe_waits
from engine.actors.schedule import URGENT, Graphs
from engine.actors.speculation import Speculation
from engine.fsm.environment import Environment, From
from engine.messages import (
    GOES_ON,
    Message,
    PeerDown,
    RequestFailed,
    RunStep,
    Sampling,
    StepDone,
    StepOut,
    Submit,
    SubmitBatch,
)

EOS, WORD = 1, 2
FAILED = ("stalled", "lost")


class Watched(Rank):
    """Notes a plan that leaves the server's own probe out, although it has come and its place is free."""

    DATA = (*Rank.DATA, "late")
    late = False

    def plan_next(self, msg: object) -> None:
        super().plan_next(msg)
        if self.plan is not None and probe_waits(self.requests):
            self.late = True


def rank(rank: int = 0, ranks: int = 1, speculation: Speculation | None = None, **changes: int) -> Watched:
    """A rank with two slots, one place in the queue and graphs for a few sizes."""
    values = {
        "slots": 2,
        "queued": 2,
        "chunk_tokens": 256,
        "context_tokens": 600,
        "window_tokens": 128,
        "full_pages": 4,
        "window_pages": 5,
        "watchdog_ms": 1000,
        **changes,
    }
    graphs = Graphs(decode=(1, 2), prefill=(1, 4))
    return Watched(
        RankSetup(rank=rank, ranks=ranks, eos_ids=(EOS,), graphs=graphs, speculation=speculation, **values)
    )


def submit(
    request_id: int, prompt: int = 1, most: int = 2, priority: int = 0, deadline_s: float = 0.0
) -> SubmitBatch:
    """A request with a prompt of so many tokens that wants `most` tokens."""
    tokens = np.full(prompt, WORD, np.int32).tobytes()
    return SubmitBatch(
        (Submit(request_id, tokens, Sampling(most), priority=priority, deadline_s=deadline_s),)
    )


def probe(request_id: int) -> SubmitBatch:
    """The server's own: one token."""
    return submit(request_id, most=1, priority=URGENT)


def batch(request_ids: list[int], prompt: int = 1, most: int = 2) -> SubmitBatch:
    """Requests that arrive together."""
    return SubmitBatch(tuple(submit(request_id, prompt, most).items[0] for request_id in request_ids))


class Devices(Environment):
    """One device a rank, whose steps end at any time with a token, EOS or a failure; and the client's side.

    A rank that ends, however, is heard by the others behind all that it sent. One that dies gets the news of
    another's death: from that message on it does nothing any more.

    deaths    how many ranks may die, at any moment
    outcomes  what a step may end with, for all its rows: token, eos, fail
    queues    steps on each device, oldest first
    ended     (request, terminal events); open, for monitors: requests with output and no end
    ran       (epoch, ranks) of epochs that not every rank has run yet
    faulty    what the client's side saw that must not be
    """

    DATA: ClassVar[tuple[str, ...]] = ("queues", "ended", "ran", "faulty", "deaths")

    def __init__(self, ranks: int = 1, outcomes: list[str] | None = None, deaths: int = 0) -> None:
        self.deaths = deaths
        self.outcomes = tuple(outcomes or ["token"])
        self.ranks = ranks
        self.queues: dict[str, list[RunStep]] = {f"rank{number}": [] for number in range(ranks)}
        self.ended: dict[int, int] = {}
        self.ran: dict[int, list[str]] = {}
        self.faulty = ""

    def observe(self, sender: str, effect: Any) -> list[Any]:
        """Steps are queued; outputs and terminal events are counted; the others hear of a rank's end."""
        if isinstance(effect, Run):
            self.queues[sender].append(effect.job)
            self._note_run(sender, effect.job.epoch)
        elif isinstance(effect, Send) and isinstance(effect.msg, StepOut):
            ids = np.frombuffer(effect.msg.request_ids, np.int64).tolist()
            for request_id, finish in zip(ids, effect.msg.finish, strict=True):
                if request_id in self.ended:
                    self.faulty = "I6"
                if finish != GOES_ON:
                    self._end(request_id)
        elif isinstance(effect, Send) and isinstance(effect.msg, RequestFailed):
            self._end(effect.msg.request_id)
        elif isinstance(effect, Stop):
            if self.queues[sender] and effect.reason == "stopped":
                self.faulty = "I8"
            return [
                From(sender, other, PeerDown(int(sender[4:]), "PeerDead", "gone"))
                for other in self.queues
                if other != sender
            ]
        return []

    def _end(self, request_id: int) -> None:
        self.ended[request_id] = self.ended.get(request_id, 0) + 1
        self.ended = dict(sorted(self.ended.items()))

    def _note_run(self, sender: str, epoch: int) -> None:
        ran = self.ran.setdefault(epoch, [])
        ran.append(sender)
        ran.sort()
        if len(ran) == self.ranks:
            del self.ran[epoch]
        self.ran = dict(sorted(self.ran.items()))

    def choices(self) -> list[tuple[str, str]]:
        """The oldest step of each device ends, each way."""
        return [
            (name, outcome)
            for name, queue in self.queues.items()
            if queue
            for outcome in (self.outcomes if any(queue[0].samples) else self.outcomes[:1])
        ]

    def faults(self) -> list[tuple[str, str]]:
        """Any rank may die."""
        return [(name, "die") for name in self.queues] if self.deaths else []

    def choose(self, choice: tuple[str, str]) -> list[Any]:
        """The step's results go to its rank, or its death does."""
        name, outcome = choice
        if outcome == "die":
            self.deaths -= 1
            return [From("death", name, PeerDown(int(name[4:]), "PeerDead", "killed"))]
        step = self.queues[name].pop(0)
        return [Send(name, done(step, outcome))]


def done(step: RunStep, outcome: str) -> StepDone:
    """The results of a step whose sampled rows all end alike."""
    rows = np.flatnonzero(np.frombuffer(step.samples, np.uint8))
    if outcome == "fail":
        failed = tuple((int(row), "no token has a probability") for row in rows)
        return StepDone(step.epoch, bytes(len(step.samples)), b"", failed)
    token = EOS if outcome == "eos" else WORD
    return StepDone(step.epoch, step.samples, np.full(rows.size, token, np.int32).tobytes())


# ---- monitors ------------------------------------------------------------------------------------


def same_decision(world: Any) -> bool:
    """I2: ranks that closed the same round last took the same decision, and wrote the same round."""
    ranks = list(world.cores.values())
    return all(
        a.next_epoch != b.next_epoch or a.decision == b.decision for a in ranks for b in ranks if a is not b
    )


def everyone_takes_part(world: Any) -> bool:
    """I9: a round that one rank runs is run by each rank that has closed it."""
    for epoch, ran in world.environment.ran.items():
        for name, core in world.cores.items():
            if core.next_epoch > epoch and name not in ran and core.state not in FAILED:
                return False
    return True


def nothing_after_the_end(world: Any) -> bool:
    """I6, I8: no output after a terminal event; a rank that stops has left nothing on its device."""
    return not world.environment.faulty


def no_probe_is_passed(world: Any) -> bool:
    """The server's own probe rides in the first step that is planned after it came, whatever clients hold."""
    return not any(core.late for core in world.cores.values())


def one_terminal_event(world: Any) -> bool:
    """I11, at any time: not two."""
    return all(count == 1 for count in world.environment.ended.values())


def all_ended(world: Any) -> bool:
    """I11, at the end of a run: every request that a rank was told of has its terminal event."""
    told = {
        submit.request_id
        for core in world.cores.values()
        for submit in core.requests.submits
        if submit is not None
    }
    failed = any(core.state in FAILED for core in world.cores.values())
    return failed or told <= set(world.environment.ended)


def no_rank_is_left_alone(world: Any) -> bool:
    """At the end of a run: where one rank has failed, all have ended."""
    states = [core.state for core in world.cores.values()]
    return not any(state in FAILED for state in states) or all(
        state in (*FAILED, "stopped") for state in states
    )


def everything_returned(world: Any) -> bool:
    """I10, at the end of a run: no rank holds a page or a slot."""
    return all(
        core.state in FAILED
        or (
            core.requests.held.full.free == core.requests.held.full.usable
            and core.requests.held.window.free == core.requests.held.window.usable
            and not core.requests.held.slot.any()
        )
        for core in world.cores.values()
    )


def tick(now_s: float) -> Message:
    """The rank's clock."""
    from engine.messages import Tick

    return Tick(now_s, now_s)
