"""Which steps are recorded, which of them run, and in which order a rank lets go of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from engine.actors.rank import Rank
from engine.actors.schedule import Graphs as Agreed
from engine.config import Settings
from engine.cost_cells import Cell, Stage
from engine.cost_table import subject_of
from engine.errors import ConfigError, ShapeMismatch
from engine.messages import RunStep, StepDone
from engine.model.model import DeepseekV4
from engine.rank_parts import ModelParts
from engine.runner.graph_layout import GraphKey
from engine.runner.graph_start import record_graphs, recorded
from engine.runner.graphs import graph_keys, page_sizes, token_sizes
from tests.machines.test_rank_with_model import Served, submit
from tests.runner.graph_pair import WIDTH, Pair, planned
from tests.runner.spec_driver import scripted_driver


def test_sizes_cover_every_step_that_ranks_may_agree_on() -> None:
    assert token_sizes(24, 1) == (1, 2, 3, 4, 6, 8, 12, 16, 24)
    assert token_sizes(100, 32) == (32, 64, 96, 128)
    assert page_sizes(100) == (16, 64, 100)
    assert page_sizes(4096) == (16, 64, 256, 1024, 4096)
    assert page_sizes(16) == (16,)
    assert page_sizes(3) == (3,)
    made = graph_keys(24, 4, 6, 20, 1)
    assert list(made) == sorted(made, reverse=True)
    assert {key.tokens for key in made} == set(token_sizes(24, 1))
    assert all(key.slots == min(4, key.tokens) and key.width == 6 for key in made)
    assert {key.pages for key in made} == {16, 20}


def test_every_page_of_the_longest_request_has_a_size_and_no_size_is_longer(native: DeepseekV4) -> None:
    runner = Served(native, 20, 1024).runner
    for context, pages in ((257, 2), (4096, 16), (1 << 20, 19)):
        settings = Settings(device="cuda", cuda_graph_max_bs_decode=1)
        graphs = recorded(runner, settings, context, lambda text: None)
        assert max(key.pages for key in graphs._recorded) == pages


def test_a_batch_that_fits_no_size_is_refused_where_ranks_agreed_on_one(native: DeepseekV4) -> None:
    pair = Pair(native, 9)
    pair.join(1, 5)
    with pytest.raises(ShapeMismatch, match="ranks agreed on a graph of 5 rows"):
        planned(pair.recorded, 5)


def test_a_rank_agrees_on_recorded_sizes_and_counts_what_ran(native: DeepseekV4) -> None:
    requests = [submit(1, 20, 9), submit(2, 126, 9), submit(3, 3, 9)]
    wanted = Served(native, 20, 1024).run(*requests)
    served, said = Served(native, 20, 1024), list[str]()
    settings = Settings(device="cuda", cuda_graph_max_bs_decode=2)
    graphs = served.runner.path.graphs = recorded(served.runner, settings, 1024, said.append)
    served.rank = Rank(replace(served.rank.setup, graphs=Agreed(decode=graphs.tokens)))
    assert served.run(*requests) == wanted
    assert said == [
        "capturing 1 of 2 (decode 2 rows, 2 requests of up to 1024 tokens)",
        "capturing 2 of 2 (decode 1 rows, 1 requests of up to 1024 tokens)",
    ]
    # Three requests are more than the largest size has, and chunks of prompts have none.
    passes = served.rank._ledger.passes
    assert all(passes[mode] for mode in ("decode_graph", "decode_none", "prefill_none"))
    assert not passes["prefill_graph"]


def test_a_rank_lets_go_of_its_graphs_first(native: DeepseekV4) -> None:
    pair = Pair(native, 10)
    pair.join(1, 5)
    graphs = pair.recorded.path.graphs
    assert graphs is not None
    batch = planned(pair.recorded, 4).batch
    assert graphs.key_for(batch) == GraphKey(4, 4, 1, WIDTH)
    parts = ModelParts()
    parts._device, parts._graphs = "cuda", graphs
    anyio.run(parts.release, "graphs")
    assert parts._graphs is None
    assert graphs.key_for(batch) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cuda_graph_max_bs_decode": 8}, "steps on the CPU run eagerly"),
        ({"cuda_graph_max_bs_decode": -1}, "at least 0"),
        ({"cuda_graph_max_bs_decode": 8, "device": "cuda", "disable_cuda_graph": True}, "contradicts"),
    ],
)
def test_settings_that_no_graph_can_follow_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings(**given)


def test_steps_on_the_cpu_stay_eager(native: DeepseekV4) -> None:
    runner = Served(native, 4, 1024).runner
    assert record_graphs(runner, Settings(), 1024, lambda text: None) is None
    assert runner.path.graphs is None


def test_costs_are_measured_of_the_steps_that_will_run(native: DeepseekV4) -> None:
    driver, _ = scripted_driver(native)
    assert subject_of(driver.runner).captured == ()
    settings = Settings(device="cuda", cuda_graph_max_bs_decode=2)
    graphs = driver.runner.path.graphs = recorded(driver.runner, settings, 256, lambda text: None)
    assert graphs.tokens == (1, 2, 3, 4, 6, 8, 12)
    subject, buckets = subject_of(driver.runner), list[int]()

    def execute(job: RunStep) -> StepDone:
        buckets.append(job.bucket)
        return driver.runner.execute(job)

    stage = Stage(replace(subject, execute=execute))
    for cell in (Cell(2, 2, False), Cell(1, 1, False), Cell(3, 3, False), Cell(7, 7, False)):
        assert stage.run_cell(cell) > 0
    # Prompts have no size.
    assert [bucket for bucket in buckets if bucket] == [2, 1, 3, 8]
    assert 0 in buckets
