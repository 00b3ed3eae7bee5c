"""The scheduler of one rank: its machine in specs/rank.toml, its policy in schedule.py and planning.py.

Every step is a round: each rank sends its wants (`Peer`), each takes the same decision from all wants, each
runs its part. A rank without work answers a round that another one began. The epoch is the round's number.
While a step runs the next one is agreed and sent to the device, from plans that name tokens by relay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.actors.batches import Batch, agreed, idle_batch
from engine.actors.core import Core, Run, Send, Stop
from engine.actors.intake import CLIENT_GONE, Intake, RankSetup
from engine.actors.ledger import Ledger, snapshot_of
from engine.actors.planning import Planner
from engine.actors.rank_checks import accounts_agree, flight_reads_only_what_is_held
from engine.actors.requests import Requests, Word, ending
from engine.actors.results import Results
from engine.actors.schedule import STOPPING, Decision, Want, decide
from engine.errors import NotServing
from engine.memory.pages import ASIDE, PagePool
from engine.messages import (
    FAILED,
    Abort,
    MatcherReady,
    Peer,
    PeerDown,
    RankLoad,
    RequestFailed,
    StepDone,
    SubmitBatch,
    Tick,
)


class Rank(Core):
    """One rank.

    next_epoch  of the next round     heard    wants of that round by rank, None where not heard
    plan        this rank's part of that round, when offered
    flight      batches on the device, the running one first
    decision    of the last round
    """

    SPEC = "rank"
    # The ledger isn't among them: it counts, and no decision reads it.
    DATA = ("requests", "intake", "planner", "next_epoch", "heard", "plan", "flight", "decision")

    def __init__(self, setup: RankSetup, figures: Callable[[], dict[str, float]] = dict) -> None:
        """figures  of the device's side, for metrics"""
        super().__init__()
        self.setup = setup
        self.watchdog_ms = setup.watchdog_ms
        full, window = (
            PagePool(name, pages + ASIDE, ASIDE)
            for name, pages in (("full", setup.full_pages), ("window", setup.window_pages))
        )
        self.requests = Requests(setup.slots, setup.queued, full, window, self._tell)
        self.intake = Intake(setup, self.requests, self._tell)
        self.planner = Planner(self.requests, setup.chunk_tokens, setup.graphs, setup.speculation)
        self._results = Results(self.requests, setup.rank, setup.eos_ids, setup.window_tokens)
        captured = sorted({*setup.graphs.decode, *setup.graphs.prefill})
        self._ledger = Ledger(setup.speculation, captured)
        self._figures = figures
        self.next_epoch = 0
        self.heard: list[Want | None] = [None] * setup.ranks
        self.plan: Batch | None = None
        self.flight: list[Batch] = []
        self.decision: Decision | None = None

    def _tell(self, msg: Word) -> None:
        self.emit(Send("detok" if isinstance(msg, RequestFailed) else "matchers", msg))

    # -- guards --------------------------------------------------------------------------------

    def is_early(self, msg: Peer) -> bool:
        """The peer is one round further."""
        return msg.epoch > self.next_epoch

    def answers_oldest(self, msg: StepDone) -> bool:
        """The results are those of the oldest step in flight."""
        return msg.epoch == self.flight[0].step.epoch

    def answers_first_of_two(self, msg: StepDone) -> bool:
        """So they are, and another step is on the device."""
        return len(self.flight) == 2 and self.answers_oldest(msg)

    def nobody_runs(self, msg: None) -> bool:
        """No rank has tokens: the round was begun by one that wants to stop."""
        return not any(want.tokens for want in self._wants())

    def offered_before_stop(self, msg: None) -> bool:
        """Nobody runs, and this rank's wants were sent before it was told to stop: it hasn't said so yet."""
        assert self.plan is not None
        return self.nobody_runs(msg) and self.plan.want.mode != STOPPING

    def nothing_began(self, msg: PeerDown) -> bool:
        """No round was ever agreed, and no request waits: the peer has ended while ranks came up."""
        return self.next_epoch == 0 and not self.requests.rows("pending").size

    def offers_nothing(self, msg: PeerDown) -> bool:
        """No row rides in what this rank offered."""
        assert self.plan is not None
        return self.plan.want.tokens == 0

    def everyone_stops(self, msg: None) -> bool:
        """Every rank wants to stop."""
        return all(want.mode == STOPPING for want in self._wants())

    # -- requests ------------------------------------------------------------------------------

    def accept(self, msg: SubmitBatch) -> None:
        """Requests wait from now on, before the next batch is formed (I3)."""
        self._ledger.note_received(msg.items)
        self.intake.enqueue(msg.items)

    def refuse(self, msg: SubmitBatch) -> None:
        """The rank is stopping."""
        self.intake.refuse(msg.items, NotServing.http_status, "the server is stopping")

    def abort(self, msg: Abort) -> None:
        """Ends the request now; a step in flight that it rides in runs in vain."""
        self.intake.abort(msg.request_id, msg.reason, CLIENT_GONE, "aborted")

    def take_matcher(self, msg: MatcherReady) -> None:
        """The request joins the line, or fails; one that has ended meanwhile is nobody's loss."""
        row = self.requests.row_of.get(msg.request_id)
        if row is None or not self.requests.are("pending", np.array([row]))[0]:
            return
        if msg.text:
            self.requests.end("Fail", row, ending(FAILED, msg.status, msg.text))
        else:
            self.requests.fire("Ready", np.array([row]))

    def end_all(self, msg: object) -> None:
        """Every request gets its terminal event."""
        self.intake.abort_all()

    # -- rounds --------------------------------------------------------------------------------

    def plan_next(self, msg: object) -> None:
        """Offers the next step if there is something to run, or if a peer has begun the round (I9)."""
        self.plan = self.planner.next_batch(self.next_epoch)
        if self.plan is not None or any(want is not None for want in self.heard):
            self.post("Offer")

    def propose_stop(self, msg: object) -> None:
        """Begins or joins a round with the wish to stop."""
        self.post("Offer")

    def offer(self, msg: None) -> None:
        """Tells every rank what this one wants of the round."""
        if self.plan is None:
            self.plan = idle_batch(self.next_epoch, Want())
        self._publish_want()

    def offer_to_stop(self, msg: None) -> None:
        """Tells every rank that this one has nothing left and wants to stop."""
        self.plan = idle_batch(self.next_epoch, Want(mode=STOPPING))
        self._publish_want()

    def _publish_want(self) -> None:
        assert self.plan is not None
        own = self.setup.rank
        for rank in range(self.setup.ranks):
            if rank != own:
                self.emit(Send(f"rank{rank}", Peer(self.next_epoch, own, tuple(self.plan.want))))
        self._hear(own, self.plan.want)

    def note_peer(self, msg: Peer) -> None:
        """A peer's wants of the next round."""
        self._hear(msg.src, Want(*msg.values))

    def _hear(self, rank: int, want: Want) -> None:
        self.heard[rank] = want
        if all(heard is not None for heard in self.heard):
            self.post("Agreed")

    def _wants(self) -> list[Want]:
        return [want for want in self.heard if want is not None]

    def _close_round(self) -> tuple[Batch, Decision]:
        assert self.plan is not None
        batch, self.plan = self.plan, None
        wants = self._wants()
        self.decision = decide(wants, self.setup.graphs)
        batch.step = agreed(batch, wants, self.decision, self.setup.speculation is not None)
        self.heard = [None] * self.setup.ranks
        self.next_epoch += 1
        return batch, self.decision

    def launch(self, msg: None) -> None:
        """Runs this rank's part of the agreed step."""
        batch, decision = self._close_round()
        self.flight.append(batch)
        self._ledger.note_launch(batch, decision)
        self.emit(Run(batch.step))

    def skip_round(self, msg: None) -> None:
        """Nobody has tokens: nobody runs."""
        self._close_round()

    def commit(self, msg: StepDone) -> None:
        """Takes in the results of the oldest step."""
        batch = self.flight.pop(0)
        self._ledger.note_done(batch, msg)
        if self.planner.drafts is not None:
            self.planner.drafts.note(batch, msg)
        out = self._results.commit(batch, msg)
        if out is not None:
            self.emit(Send("detok", out))
        self._publish_load()

    def _publish_load(self) -> None:
        """Of several ranks, for whoever spreads requests over them."""
        if self.setup.ranks > 1:
            tokens, received = self._ledger.load(self.requests)
            self.emit(Send("board", RankLoad(self.setup.rank, 0, tokens, received)))

    # -- time and the end ----------------------------------------------------------------------

    def tick(self, msg: Tick) -> None:
        """Ends requests that are over their time, then publishes a snapshot, idle or not."""
        self.intake.check_deadlines(msg.now_s)
        self._ledger.note_tick(msg.now_s)
        counters = self._ledger.counters(self.requests, self.planner, self._results.cut)
        counters |= self._figures()
        held = self.requests.held
        self.emit(Send("api", snapshot_of(self.setup.rank, msg.wall_s, self.state, counters, held)))
        self._publish_load()

    def end(self, msg: None) -> None:
        """All ranks stop in this round."""
        self._close_round()
        self.emit(Stop("stopped"))

    def end_alone(self, msg: PeerDown) -> None:
        """Nothing is left here that needs the others; how the peer ended is for the launcher to say."""
        self.plan = None
        self.emit(Stop("stopped"))

    def report_stall(self, msg: object) -> None:
        """The process ends with an error."""
        missing = [rank for rank, want in enumerate(self.heard) if want is None]
        epochs = [batch.step.epoch for batch in self.flight]
        self.emit(
            Stop(
                f"stalled: steps {epochs} on the device, ranks {missing} not heard in round {self.next_epoch}"
            )
        )

    def report_loss(self, msg: PeerDown) -> None:
        """The process ends with the error that the message names."""
        self.emit(Stop(f"{msg.kind}: {msg.reason}"))

    # -- invariants ----------------------------------------------------------------------------

    def flight_reads_only_what_is_held(self) -> bool:
        """I5."""
        return flight_reads_only_what_is_held(
            self.requests, [batch.step for batch in self.flight], self.setup.window_tokens
        )

    def accounts_agree(self) -> bool:
        """I10."""
        return accounts_agree(self.requests)

    def idle_means_done(self) -> bool:
        """R1."""
        r = self.requests
        return self.state != "idle" or not any(r.rows(g).size for g in ("waiting", "active", "ending"))
