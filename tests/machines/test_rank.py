"""One rank against random submits, aborts, ticks and step ends; corruption of a page shows as wrong text."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.actors.schedule import URGENT
from engine.messages import Stop, Tick
from tests.machines.harness import Harness, submit_of

SIZES = st.tuples(st.integers(1, 900), st.integers(1, 400))


class OneRank(RuleBasedStateMachine):
    """Everything that may reach a rank, in any order."""

    @initialize(
        full=st.integers(3, 12),
        window=st.integers(3, 12),
        chunk=st.sampled_from([64, 256, 300, 700]),
        slots=st.integers(1, 4),
    )
    def begin(self, full: int, window: int, chunk: int, slots: int) -> None:
        self.h = Harness(full_pages=full, window_pages=window, chunk_tokens=chunk, slots=slots)
        self.ids = 0
        self.now_s = 0.0

    @rule(
        sizes=st.lists(SIZES, min_size=1, max_size=3),
        priority=st.integers(0, 2),
        least=st.sampled_from([0, 3]),
        ignore_eos=st.booleans(),
        stops=st.sampled_from([(), (5, 6)]),
        deadline_s=st.sampled_from([0.0, 0.0, 2.0]),
    )
    def submit(
        self,
        sizes: list[tuple[int, int]],
        priority: int,
        least: int,
        ignore_eos: bool,
        stops: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        items = []
        for prompt, most in sizes:
            self.ids += 1
            if deadline_s:
                self.h.aborted.add(self.ids)
            how = {"min_new_tokens": least, "ignore_eos": ignore_eos, "stop_token_ids": stops}
            items.append(submit_of(self.ids, prompt, most, priority, deadline_s, **how))
        self.h.submit(*items)

    @rule()
    def probe(self) -> None:
        self.ids += 1
        self.h.submit(submit_of(self.ids, 1, 1, URGENT))

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.h.abort(data.draw(st.integers(1, self.ids)))

    @precondition(lambda self: self.h.jobs[0])
    @rule(steps=st.integers(1, 200))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if self.h.jobs[0]:
                self.h.step()

    @rule()
    def tick(self) -> None:
        self.now_s += 1.0
        self.h.tell(Tick(self.now_s, self.now_s))

    @invariant()
    def the_rank_is_sound(self) -> None:
        if hasattr(self, "h"):
            assert self.h.rank.accounts_agree()
            assert self.h.rank.flight_reads_only_what_is_held()
            assert self.h.jobs[0] or self.h.rank.state == "idle"

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.finish()
            self.h.check_texts()
            self.h.check_all_returned()
            self.h.tell(Stop())
            assert self.h.stopped == {0: "stopped"}


OneRank.TestCase.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOneRank = OneRank.TestCase
