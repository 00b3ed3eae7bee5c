"""Every series of grammars exists before anything is asked, and says what service and ranks count."""

from __future__ import annotations

import pytest

from engine.grammar.pipeline_counters import PipelineCounters
from engine.grammar.worker_job import Finished
from engine.grammar_metrics import DISK_ERRORS, PHASES
from engine.messages import Snapshot
from engine.metrics import Metrics
from tests.api.stage import says
from tests.grammar.http.stage import constrained

pytestmark = pytest.mark.anyio
NAMED = (
    "num_grammar_queue_reqs",
    "grammar_compilation_time_seconds_count",
    "num_grammar_total",
    "num_grammar_cache_hit_total",
    "num_grammar_aborted_total",
    "num_grammar_timeout_total",
    "grammar_cache_bytes",
    "grammar_cache_entries",
    "grammar_inflight",
    "grammar_disk_cache_bytes",
    "grammar_disk_pruned_total",
    "num_so_requests_total",
    "grammar_wait_seconds_count",
)


def lines_of(metrics: Metrics) -> dict[str, float]:
    """Sample -> value."""
    lines = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def fresh(ranks: int = 1) -> Metrics:
    return Metrics("sglang:", "nano", ranks, 512, ())


def test_all_series_are_there_from_the_start() -> None:
    found = lines_of(fresh())
    for name in NAMED:
        assert found[f'sglang:{name}{{model_name="nano"}}'] == 0, name
    for source in ("memory", "inflight", "disk", "local_compile_marker", "compile"):
        assert found[f'sglang:grammar_resolutions_total{{model_name="nano",source="{source}"}}'] == 0
    for reason in ("bytes", "entries"):
        assert found[f'sglang:grammar_cache_evictions_total{{model_name="nano",reason="{reason}"}}'] == 0
    for phase in PHASES:
        assert found[f'sglang:grammar_disk_phase_seconds_count{{model_name="nano",phase="{phase}"}}'] == 0
    for kind in DISK_ERRORS:
        assert found[f'sglang:grammar_disk_errors_total{{kind="{kind}",model_name="nano"}}'] == 0


def test_a_ranks_masks_are_told_as_the_rank_counts_them() -> None:
    metrics, counters = fresh(ranks=2), PipelineCounters()
    counters.batches["complete"], counters.rows["masked"], counters.terminations["failed"] = 3, 40, 1
    counters.seconds["traverse"], counters.times["traverse"] = 0.5, 3
    names = set(lines_of(metrics))
    metrics.snapshot(Snapshot(1, 1.0, "running", 0, 0, 0, 0, 0, 0, counters.figures()))
    found = lines_of(metrics)
    assert names == set(found)

    def of_rank(rank: int, name: str, **more: str) -> float:
        labels = [("dp_rank", str(rank)), *(("engine_type", "unified"), ("model_name", "nano"))]
        labels += [("moe_ep_rank", "0"), ("pp_rank", "0"), ("tp_rank", "0"), *more.items()]
        told = ",".join(f'{label}="{value}"' for label, value in sorted(labels))
        return found[f"sglang:{name}{{{told}}}"]

    assert of_rank(1, "dspark_grammar_batches_total", outcome="complete") == 3
    assert of_rank(1, "dspark_grammar_rows_total", outcome="masked") == 40
    assert of_rank(1, "dspark_grammar_terminations_total", outcome="failed") == 1
    assert of_rank(1, "dspark_grammar_seconds_sum", phase="traverse") == 0.5
    assert of_rank(1, "dspark_grammar_seconds_count", phase="traverse") == 3
    assert of_rank(0, "dspark_grammar_batches_total", outcome="complete") == 0


def test_totals_of_masks_go_on_where_a_rank_begins_to_count_again() -> None:
    metrics, name = fresh(), "dspark_grammar_rows_total"
    told = []
    for masked in (5, 8, 2, 3):
        counters = PipelineCounters()
        counters.rows["masked"] = masked
        metrics.snapshot(Snapshot(0, 1.0, "running", 0, 0, 0, 0, 0, 0, counters.figures()))
        metrics.snapshot(Snapshot(0, 1.0, "running", 0, 0, 0, 0, 0, 0, {}))
        told += [
            value for one, value in lines_of(metrics).items() if name in one and 'outcome="masked"' in one
        ]
    assert told == [5, 8, 10, 11]


async def test_the_series_follow_the_service() -> None:
    async with constrained(says("abc")) as found:
        for _ in range(3):
            await found.made.post("/v1/completions", {"prompt": "x", "regex": "[a-c]+"})
        service, figures = found.compiling.service, lines_of(found.made.metrics)
        for name, value in service.figures().items():
            bare, _, label = name.rstrip("}").partition("{")
            labels = ",".join(sorted(['model_name="nano"', *([label] if label else [])]))
            assert figures[f"sglang:{bare}{{{labels}}}"] == value, name
        assert figures['sglang:num_grammar_cache_hit_total{model_name="nano"}'] == 2
        assert figures['sglang:grammar_compilation_time_seconds_count{model_name="nano"}'] == 1
        service.counters.note(Finished(pruned=3))
        assert lines_of(found.made.metrics)['sglang:grammar_disk_pruned_total{model_name="nano"}'] == 3
        version = [name for name in figures if "grammar_backend_info" in name]
        assert len(version) == 1
        assert figures[version[0]] == 1
