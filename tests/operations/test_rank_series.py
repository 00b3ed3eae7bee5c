"""What a rank's process measures, by the messages that pass through it, in a registry of its own."""

from __future__ import annotations

import gc
import math
import time

import anyio
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.actors.core import Core, Effect
from engine.actors.process import Process
from engine.actors.wiring import wiring
from engine.errors import PeerDead
from engine.exchange import WORDS
from engine.exchange.native import KINDS, library
from engine.messages import (
    FAILED,
    GOES_ON,
    LENGTH,
    Message,
    PeerDown,
    RequestFailed,
    RunStep,
    Sampling,
    SlotBind,
    Snapshot,
    StepDone,
    StepOut,
    Submit,
    SubmitBatch,
)
from engine.metrics import Metrics
from engine.metrics_tables import CHANNELS, ERRORS, EXCHANGE_S, HISTOGRAMS, RANK_LABELS
from engine.rank_figures import RankFigures
from engine.rank_metrics import RankMetrics

PROMPT = np.arange(5, dtype=np.int32).tobytes()


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(epoch: int, tokens: int, *binds: int, ranks: tuple[tuple[int, int, int], ...] = ()) -> RunStep:
    bound = tuple(SlotBind(1, 1, one, 0, Sampling(max_new_tokens=4), 5) for one in binds)
    return RunStep(epoch, "mixed", b"", b"", b"", b"", bytes(4 * tokens), b"", binds=bound, ranks=ranks)


def out(epoch: int, *rows: tuple[int, int, int]) -> StepOut:
    """Rows: request id, tokens, finish code."""
    ids, counts, finish = zip(*rows, strict=True)
    tokens = bytes(4 * sum(counts))
    return StepOut(epoch, 0, np.array(ids, np.int64).tobytes(), bytes(counts), tokens, bytes(finish))


def snapshot(figures: RankFigures, rank: int = 0) -> Snapshot:
    sent = figures.published(Snapshot(rank, 1.0, "running", 1, 0, 6, 8, 1, 4, {}))
    assert isinstance(sent, Snapshot)
    return sent


def read(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


class Series:
    """A registry with two ranks, and what it exposes of one."""

    def __init__(self, native: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.ranks = RankMetrics(self.registry, "x:", "m", 2, 64, native)

    def __call__(self, name: str, rank: int = 0, **labels: str) -> float:
        own = dict(zip(RANK_LABELS, ("m", "unified", str(rank), "0", "0", "0"), strict=True))
        return read(generate_latest(self.registry))["x:" + name, tuple(sorted({**own, **labels}.items()))]


def test_tables_are_those_of_the_native_exchange() -> None:
    assert tuple(bound / 1e9 for bound in library().BOUNDS_NS) == EXCHANGE_S
    assert EXCHANGE_S[0] == 1e-7
    assert tuple(kind.__name__ for kind, _ in KINDS[1:]) == ERRORS
    assert len(CHANNELS) == len(WORDS)


def test_a_request_is_timed_from_the_mailbox_to_its_end() -> None:
    clock, series = Clock(), Series()
    figures = RankFigures(0, clock)
    stages = figures.stages
    stages.arrived(SubmitBatch(tuple(Submit(one, PROMPT, Sampling(max_new_tokens=4)) for one in (1, 2, 3))))
    clock.now_s += 0.25
    figures.submitted(step(0, 10, 1, 2))
    clock.now_s += 1.0
    figures.done()
    stages.sent(out(0, (1, 1, GOES_ON), (2, 0, GOES_ON)))
    clock.now_s += 2.0
    stages.sent(out(1, (1, 1, LENGTH), (2, 1, GOES_ON)))
    stages.sent(RequestFailed(3, FAILED, 500, "late"))
    figures.submitted(step(1, 1, 3))
    series.ranks.note(snapshot(figures))
    stage = "per_stage_req_latency_seconds"
    assert series("queue_time_seconds_count") == 2
    assert series("queue_time_seconds_sum") == 0.5
    assert series("queue_time_seconds_bucket", le="0.2") == 0
    assert series("queue_time_seconds_bucket", le="0.5") == 2
    assert series(stage + "_sum", stage="queue") == 0.5
    assert series(stage + "_sum", stage="prefill") == 1.0 + 3.0
    assert (series(stage + "_count", stage="decode"), series(stage + "_sum", stage="decode")) == (1, 2.0)
    assert series(stage + "_sum", stage="inference") == 3.0
    assert series("scheduler_idle_seconds_total") == 0.25 + 2.0


def test_steps_are_counted_by_what_the_ranks_agreed_on() -> None:
    clock, series = Clock(), Series()
    figures = RankFigures(1, clock)
    for epoch, (own, other) in enumerate([(30, 10), (0, 8), (5, 5)]):
        figures.exchange.offered()
        clock.now_s += 0.125
        figures.submitted(step(epoch, own, ranks=((1, other, 1), (1, own, 1))))
        figures.done()
    series.ranks.note(snapshot(figures, 1))
    assert series("dp_attention_tokens_total", 1, kind="scheduled") == 35
    assert series("dp_attention_tokens_total", 1, kind="group") == 58
    assert series("dp_attention_steps_total", 1, rank_state="busy") == 2
    assert series("dp_attention_steps_total", 1, rank_state="idle") == 1
    assert series("dp_attention_token_imbalance_ratio_sum", 1) == 1.5 + 2 + 1
    assert series("dp_attention_token_imbalance_ratio_bucket", 1, le="1.0") == 1
    assert series("dp_attention_sync_wait_seconds_sum", 1) == 0.375
    assert series("iteration_tokens_count", 1) == 2
    assert series("dp_attention_tokens_total", 0, kind="group") == 0, "another rank's series"


def test_work_is_timed_by_what_it_was_about_and_its_longest_piece_is_forgotten_in_time() -> None:
    clock, series = Clock(), Series()
    figures = RankFigures(0, clock)

    def receive(msg: object) -> list[object]:
        clock.now_s += 0.5 if isinstance(msg, StepDone) else 0.125
        return []

    work = figures.work.timed(receive)  # type: ignore[arg-type]
    for msg in (StepDone(0, b"", b""), SubmitBatch(()), SubmitBatch(()), "time-out"):
        work(msg)
    series.ranks.note(snapshot(figures))
    assert series("scheduler_phase_seconds_total", phase="results") == 0.5
    assert series("scheduler_phase_calls_total", phase="submit") == 2
    assert series("scheduler_phase_seconds_total", phase="other") == 0.125
    assert series("scheduler_phase_max_seconds", phase="results") == 0.5
    for _ in range(2):
        clock.now_s += 30
        snapshot(figures)
    series.ranks.note(snapshot(figures))
    assert series("scheduler_phase_max_seconds", phase="results") == 0


def test_totals_go_on_where_another_process_counts_from_nothing() -> None:
    series, clock = Series(), Clock()
    for expected in (1, 2):
        figures = RankFigures(0, clock)
        figures.stages.arrived(SubmitBatch((Submit(7, PROMPT, Sampling(max_new_tokens=4)),)))
        clock.now_s += 0.25
        series.ranks.note(snapshot(figures))
        figures.submitted(step(0, 3, 7))
        series.ranks.note(snapshot(figures))
        series.ranks.note(snapshot(figures))
        assert series("queue_time_seconds_count") == expected
        assert series("queue_time_seconds_bucket", le="+Inf") == expected
        assert series("queue_time_seconds_sum") == expected * 0.25


def test_collections_of_garbage_are_timed_while_watched() -> None:
    figures = RankFigures(0)
    began_s = time.perf_counter()
    figures.pauses.watch()
    figures.pauses.watch()
    try:
        gc.collect()
    finally:
        figures.pauses.leave()
    watched_s = time.perf_counter() - began_s
    seen = sum(figures.pauses.seconds.counts)
    gc.collect()
    assert seen >= 1
    assert sum(figures.pauses.seconds.counts) == seen
    series = Series()
    series.ranks.note(snapshot(figures))
    assert series("scheduler_gc_pause_seconds_count") == seen
    assert 0 < series("scheduler_gc_pause_seconds_sum") <= watched_s


@pytest.mark.parametrize("native", [False, True])
def test_nothing_new_appears_when_figures_come(native: bool) -> None:
    series = Series(native)
    before = set(read(generate_latest(series.registry)))
    figures = RankFigures(0)
    figures.exchange.failed(KINDS[5][0]("late", 0))
    sent = snapshot(figures)
    series.ranks.note(sent)
    assert set(read(generate_latest(series.registry))) == before
    known = {key for key in sent.counters if not key.startswith("dp2_")}
    assert known <= set(series.ranks._values[0])
    if native:
        assert series("dp2_sync_errors_total", channel="mlp_info", code=KINDS[5][0].__name__) == 1


def test_what_isn_t_declared_is_not_exported() -> None:
    series = Series()
    keys = {'spec_steps_total{reason="x"}': 1.0, "other": 2.0, 'gen_throughput{a="b"}': 3.0, "a b": 4.0}
    series.ranks.note(Snapshot(0, 1.0, "running", 1, 0, 6, 8, 1, 4, keys))
    text = generate_latest(series.registry).decode()
    assert not any(word in text for word in ("other ", 'reason="x"', 'a="b"'))


def test_histograms_are_cumulative_and_end_in_infinity() -> None:
    metrics = Metrics("x:", "m", 1, 64, ("/health",), native=True, vllm=True)
    for family in metrics.registry.collect():
        if family.type != "histogram":
            continue
        bounds = [float(one.labels["le"]) for one in family.samples if one.name.endswith("_bucket")]
        assert bounds[-1] == math.inf, family.name
        first = bounds[: bounds.index(math.inf) + 1]
        assert first == sorted(set(first)), family.name
    assert HISTOGRAMS["per_stage_req_latency_seconds"].bounds[0] == 1e-5


class Kept:
    """An actor elsewhere, and what it was told."""

    def __init__(self) -> None:
        self.told: list[Message] = []

    def tell(self, msg: Message) -> None:
        self.told.append(msg)

    async def offer(self, msg: Message) -> None:
        self.told.append(msg)


class Quiet(Core):
    """Takes everything, and does nothing."""

    def __init__(self) -> None:
        """No machine of its own."""

    def receive(self, msg: object) -> list[Effect]:
        return []


@pytest.mark.anyio
async def test_a_lost_peer_is_published_before_the_rank_ends() -> None:
    figures, api, series = RankFigures(0), Kept(), Series(native=True)
    async with anyio.create_task_group() as tasks:
        process = Process("rank", wiring(), tasks, print)
        process.refs |= {"api": api, "detok": Kept()}
        figures.watching(lambda process: None)(process)
        try:
            receive, submit = figures.working("rank0", Quiet(), lambda job: None)
            assert process.watch is figures
            assert submit is not None
            figures.exchange.failed(PeerDead("rank 1 is gone", 1))
            receive(PeerDown(1, "PeerDead", "rank 1 is gone"))
            assert not api.told, "there is no snapshot to repeat yet"
            process.refs["api"].tell(Snapshot(0, 1.0, "running", 1, 0, 6, 8, 1, 4, {"gen_throughput": 2.0}))
            receive(PeerDown(1, "PeerDead", "rank 1 is gone"))
        finally:
            figures.pauses.leave()
        tasks.cancel_scope.cancel()
    first, last = api.told
    assert isinstance(first, Snapshot)
    assert isinstance(last, Snapshot)
    series.ranks.note(last)
    assert series("dp2_sync_errors_total", channel="mlp_info", code="PeerDead") == 1
    assert series("gen_throughput") == 2.0
