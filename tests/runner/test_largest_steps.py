"""The largest steps of a start: they have all rows, leave nothing behind, and what they take is kept free."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.cache_sizes import CacheSizes
from engine.config import NANO, Settings
from engine.errors import DeviceMemory
from engine.largest_steps import Admitted, LargestSteps, StepBytes, admitted, measured
from engine.loaded import Loaded
from engine.loading import load_rank
from engine.memory.pools import KVState
from engine.model.model import DeepseekV4
from engine.runner.batch import ForwardBatch
from engine.runner.graph_path import TargetPath
from tests.machines.test_rank_with_model import Served, submit

BLOCK = 5


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a narrow geometry with a draft."""
    fields = json.loads((NANO.parent / "flash" / "config.json").read_text())
    fields |= {
        "num_hidden_layers": 5, "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0], "hidden_size": 64,
        "dspark_target_layer_ids": [2, 3, 4], "dspark_markov_rank": 16, "moe_intermediate_size": 32,
        "num_attention_heads": 2, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 32, "o_groups": 1,
        "o_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "index_n_heads": 2,
        "index_head_dim": 32, "index_topk": 16, "dspark_noise_token_id": 2, "vocab_size": 512,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("flash")
    (folder / "config.json").write_text(json.dumps(fields))
    return Settings(
        model_path=str(folder), load_format="dummy", threads=1, max_running_requests=4, max_total_tokens=8192,
        chunked_prefill_size=600, speculative_algorithm="dspark", speculative_verify_mode="static",
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded(narrow: Settings) -> Loaded:
    """Its model, with a cache."""
    return load_rank(narrow, lambda line: None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[ForwardBatch]:
    """What the target ran."""
    batches: list[ForwardBatch] = []
    plan = TargetPath.plan

    def noted(self: TargetPath, batch: ForwardBatch, bucket: int) -> Any:
        batches.append(batch)
        return plan(self, batch, bucket)

    monkeypatch.setattr(TargetPath, "plan", noted)
    return batches


def test_the_largest_steps_have_every_row_at_the_end_of_the_longest_contexts(
    loaded: Loaded, ran: list[ForwardBatch]
) -> None:
    settings = Settings(chunked_prefill_size=600)
    most = admitted(settings, loaded.sizes, loaded.block)
    requests, width = loaded.sizes.slots - 1, BLOCK + 1
    assert (most.requests, most.chunk, most.context, most.width) == (requests, 600, 4096, width)
    # 34 pages, of which the longest request takes 16: two have room.
    assert most.lengths().tolist() == [256] * (requests - 2) + [4096] * 2
    said: list[str] = []
    LargestSteps(loaded.runner, most, said.append).run()
    _, decode, mixed = ran
    assert decode.counts.tolist() == [width] * requests
    assert (decode.starts + decode.counts).tolist() == [255] * (requests - 2) + [4095] * 2
    assert mixed.counts.tolist() == [width] * (requests - 1) + [600]
    assert int(mixed.starts[-1]) == 4096 - 600
    # Verified rows, the chunk's last one, and each of its tokens that is scored.
    assert mixed.logit_rows.size == (requests - 1) * width + 1 + 599
    assert said == [
        f"largest step: {requests * width} rows that decode, up to token 4095",
        f"largest step: 600 rows of a prompt, up to token 4096, and {(requests - 1) * width} that decode",
    ]


def test_requests_that_follow_find_nothing_of_them(native: DeepseekV4) -> None:
    requests = [submit(1, 20, 9), submit(2, 126, 9), submit(3, 3, 9)]
    wanted = Served(native, 20, 1024).run(*requests)
    served = Served(native, 20, 1024)
    LargestSteps(served.runner, Admitted(4, 300, 1024, 4864, 1), lambda line: None).run()
    # Steps look through their requests for scored prompts as long as any slot has one.
    assert not served.runner.bindings.prompts
    assert served.run(*requests) == wanted


def test_contexts_are_as_long_as_the_cache_has_room_for() -> None:
    one = Admitted(requests=3, chunk=64, context=1000, tokens=1024, width=1)
    assert one.lengths().tolist() == [256, 256, 1000]
    assert replace(one, tokens=1 << 20).lengths().tolist() == [1000] * 3
    assert replace(one, context=100).lengths().tolist() == [100] * 3
    sizes = CacheSizes(slots=4, full_pages=3, window_pages=3, context_length=4096, bytes=0)
    small = admitted(Settings(chunked_prefill_size=8192), sizes, 0)
    assert (small.context, small.chunk, small.tokens) == (512, 511, 512)


def test_a_cache_of_a_few_pages_is_enough_to_measure_a_long_context(
    loaded: Loaded, ran: list[ForwardBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, held, taken = loaded.runner.model, list[KVState](), iter((3 << 30, 2 << 30))

    def cache(slots: int, full_pages: int, window_pages: int) -> KVState:
        held.append(KVState(model.config, slots, full_pages, window_pages, "cpu", torch.float32))
        return held[-1]

    def noted(device: torch.device, step: Callable[[], None]) -> int:
        step()
        return next(taken)

    monkeypatch.setattr("engine.largest_steps._taken", noted)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    settings = Settings(chunked_prefill_size=600)
    speculation = loaded.runner.speculation
    assert speculation is not None
    found = measured(model, speculation.drafter, settings, loaded.sizes, cache, lambda line: None)
    assert held[0].full_pages == held[0].window_pages == 6
    assert int((ran[-1].starts + ran[-1].counts).max()) == 4096
    # The blocks of the first step are there for the second, which took less: the first one counts.
    assert found == StepBytes(largest=3 << 30, decode=3 << 30)
    assert found.kept(settings) == 6 << 30
    assert found.kept(Settings(device="cuda", disable_cuda_graph=True)) == 3 << 30
    assert np.array_equal(held[0].full_table[1, :16], 1 + np.arange(16) % 5)


def test_a_device_that_has_no_room_for_tables_of_slots_says_what_took_it(
    narrow: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.loading.StepRunner", full)
    with pytest.raises(DeviceMemory, match=r"cache: window .*; the largest that a setting changes is"):
        load_rank(narrow, lambda line: None)
