"""A rank that is started with speculation: what it loads, says and refuses, and what it then serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine import rank_weights
from engine.config import NANO, Settings
from engine.errors import CheckpointError, ConfigError
from engine.kernels.cpu import CpuOps
from engine.loaded import Loaded
from engine.loading import load_rank
from engine.memory.pools import KVState
from engine.messages import Sampling
from engine.model.checkpoint import load_checkpoint
from engine.model.draft import Drafter
from engine.model.draft_loading import load_drafter
from engine.model.dummy import DummyWeights, dummy_weights
from engine.model.layout import FLOAT_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.quantised import Stored, plain
from engine.model.tensor_specs import Draft
from engine.model.tokenizer import load_tokenizer
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner
from tests.runner.driver import Driver
from tests.runner.scripted_drafter import ScriptedDrafter
from tests.runner.spec_driver import CPU, SpecDriver, plain_texts

BLOCK = 5
TEMPERATURES = [1.5, 1.25, 1.0, 1.0, 0.75]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model's geometry with a draft of three stages."""
    fields = json.loads((NANO / "config.json").read_text())
    fields |= {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
        "vocab_size": 1024,
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": 1000,
        "dspark_target_layer_ids": [1, 2, 3],
        "dspark_markov_rank": 32,
        "dspark_sts_temperatures": TEMPERATURES,
    }
    path = tmp_path_factory.mktemp("drafting")
    (path / "config.json").write_text(json.dumps(fields))
    return path


def settings(folder: Path, **changes: object) -> Settings:
    chosen: dict[str, object] = {
        "model_path": str(folder), "load_format": "dummy", "threads": 1, "max_running_requests": 6,
        "max_total_tokens": 4096, "speculative_algorithm": "dspark", "speculative_verify_mode": "static",
    }  # fmt: skip
    return Settings(**(chosen | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[Loaded, list[str]]:
    said: list[str] = []
    return load_rank(settings(folder), said.append), said


def test_a_drafting_rank_says_what_drafts_and_counts_its_memory(
    folder: Path, loaded: tuple[Loaded, list[str]]
) -> None:
    rank, said = loaded
    assert rank.block == BLOCK
    line = next(line for line in said if line.startswith("draft:"))
    for part in ("5 tokens", "layers 1, 2, 3", "Markov rank 32", "1.5, 1.25, 1, 1, 0.75", "static"):
        assert part in line
    plain = load_rank(settings(folder, speculative_algorithm=""), said.append)
    assert plain.block == 0
    speculation = rank.runner.speculation
    assert speculation is not None
    assert rank.sizes.bytes - plain.sizes.bytes == speculation.bytes


def test_the_block_is_what_the_settings_say(folder: Path) -> None:
    rank = load_rank(settings(folder, speculative_num_draft_tokens=3), lambda line: None)
    assert rank.block == 3
    with pytest.raises(ConfigError, match="is 128, but must be in"):
        load_rank(settings(folder, speculative_num_draft_tokens=128), lambda line: None)


def test_what_random_prompts_taught_of_drafts_is_forgotten(folder: Path) -> None:
    speculation = load_rank(settings(folder), lambda line: None).runner.speculation
    assert speculation is not None
    assert speculation.correction.factors == (1.0, 1.0)


def test_a_checkpoint_without_a_draft_is_refused(folder: Path, tmp_path: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields = {name: value for name, value in fields.items() if not name.startswith("dspark_")}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="no mtp"):
        load_rank(settings(tmp_path), lambda line: None)


def test_a_rank_tells_its_operations_and_what_takes_its_memory(loaded: tuple[Loaded, list[str]]) -> None:
    rank, said = loaded
    assert {"operations: native", "sampling: torch"} <= set(said)
    last = next(place for place, line in enumerate(said) if line.endswith("MiB in all"))
    lines = [line for line in said[: last + 1] if line.startswith("memory:")]
    sizes = {line.split("MiB ")[1]: float(line.split()[1]) for line in lines}
    kinds = {"routed experts", "shared experts", "attention", "compressors", "indexers", "routers", "draft"}
    assert {f"weights: {kind}" for kind in kinds | {"head", "embedding"}} < sizes.keys()
    # Four layers of eight experts of three matrices of 256 x 256 in float32.
    assert sizes["weights: routed experts"] == 4 * 8 * 3 * 256 * 256 * 4 / (1 << 20)
    whole = sizes.pop("in all")
    assert sum(sizes.values()) == pytest.approx(whole, abs=1.0)
    figures = rank.figures()
    assert figures['kernel_set{set="native"}'] == 1.0
    assert figures['sampling_set{set="torch"}'] == 1.0
    assert figures["weight_memory_usage_gb"] + figures["kv_cache_memory_usage_gb"] == pytest.approx(
        whole / 1024, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mtp.2.confidence_head.proj.weight", "the draft gives NaN"),
        ("mtp.2.markov_head.markov_w2.weight", "the draft gives NaN"),
        ("mtp.0.main_norm.weight", "the draft gives NaN"),
        ("layers.2.ffn_norm.weight", "a step of the warm-up failed"),
    ],
)
def test_weights_of_nan_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    class Broken(DummyWeights):
        def __getitem__(self, wanted: str) -> Stored:
            found = super().__getitem__(wanted)
            return plain(found).fill_(torch.nan) if wanted == name else found

    monkeypatch.setattr(rank_weights, "DummyWeights", Broken)
    with pytest.raises(CheckpointError, match=said):
        load_rank(settings(folder), lambda line: None)


@pytest.mark.parametrize("budget", [-1, 4, 0])
def test_drafts_of_a_real_drafter_leave_the_greedy_text_bit_by_bit(
    loaded: tuple[Loaded, list[str]], budget: int
) -> None:
    rank, _ = loaded
    runner = rank.runner
    assert runner.speculation is not None
    # Nothing that wasn't written may be read.
    runner.speculation.state.pool.fill_(torch.nan)
    runner.speculation.ring.rows.fill_(torch.nan)
    sampling = Sampling(80, temperature=0.0, logprobs=0)
    prompts = [torch.randint(2, 1000, (n,)).tolist() for n in (3, 126, 200)]
    plain = Driver(StepRunner(runner.model, runner.state, (1,)))
    texts = [plain.generate(plain.request(4, ids, sampling), 40) for ids in prompts]
    driver = SpecDriver(runner)
    driver.generations = {slot: 10 + slot + budget for slot in range(1, 6)}
    streams = [driver.stream(slot, ids, sampling, len(ids) + 40) for slot, ids in enumerate(prompts, 1)]
    driver.round((streams[0], 3), (streams[1], 100))
    driver.round((streams[0], 6), (streams[1], 26), (streams[2], 200), budget=budget)
    scores = []
    while left := [(stream, BLOCK + 1) for stream in streams if not stream.ended]:
        done = driver.round(*left, budget=budget)
        scores.append(np.frombuffer(done.survival, np.float32))
    assert [stream.output for stream in streams] == texts
    seen = np.concatenate(scores)
    assert bool(seen.size) == bool(budget)
    assert ((seen > 0) & (seen <= 1)).all()


@pytest.mark.parametrize("drafts", ["its own", "random", "right but for every seventh"])
def test_the_shipped_models_greedy_text_is_the_same_with_drafts(drafts: str) -> None:
    config, weights = load_checkpoint(NANO, torch.float32, CPU, draft=True)
    assert config.dspark is not None
    model = DeepseekV4(
        config, weights, device="cpu", dtype=torch.float32, deterministic=False, kv_rounding="none",
        ops=CpuOps(),
    )  # fmt: skip
    tokenizer = load_tokenizer(NANO)
    questions = ("The capital of France is", "def fibonacci(n):", '{"name": "')
    prompts = {slot: tokenizer.encode(text) for slot, text in enumerate(questions, 1)}
    texts = plain_texts(model, prompts, 48)
    drafter: Drafter
    if drafts == "random":
        layout = replace(FLOAT_LAYOUT, draft=Draft.DSPARK, stages=3)
        weights = dummy_weights(config, torch.float32, CPU, layout=layout)
    drafter = load_drafter(config, weights, model)
    if drafts.startswith("right"):
        drafter = ScriptedDrafter(5, config.dspark.target_layer_ids, config.vocab_size)
        drafter.texts = texts
        drafter.wrong = {(slot, place) for slot in texts for place in range(0, 99, 7)}
    state = KVState(config, 5, 9, 9, CPU, torch.float32)
    driver = SpecDriver(StepRunner(model, state, (1,), Speculation(drafter, state, "compact")))
    streams = [
        driver.stream(slot, ids, Sampling(99, temperature=0.0), len(ids) + 48)
        for slot, ids in prompts.items()
    ]
    driver.round(*((stream, len(stream.prompt)) for stream in streams))
    driver.finish(*streams)
    for stream in streams:
        assert stream.prompt + stream.output == texts[stream.slot]
    # 47 tokens behind the first one: one a step without luck, or nearly so.
    most = {"its own": 40, "random": 48, "right but for every seventh": 16}
    assert driver.epoch - 1 <= most[drafts]
