"""The whole engine with drafts: scheduler, device thread, drafter, rounds. Its texts are those without."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import anyio
import numpy as np
import pytest
from torch import Tensor

from engine.config import NANO, Settings
from engine.local import local_engine
from engine.messages import Entry, Sampling
from engine.runner.acceptance import Acceptance, Accepted
from engine.runner.acceptance_layout import VerifyRows

SIZES = ((3, 40), (40, 41), (130, 7), (200, 64), (600, 30), (7, 1))
"""Tokens of each prompt and of its answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of the shipped model's geometry and three draft stages, for random weights."""
    fields = json.loads((NANO / "config.json").read_text())
    fields |= {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
        "dspark_block_size": 5,
        "dspark_noise_token_id": 1000,
        "dspark_target_layer_ids": [1, 2, 3],
        "dspark_markov_rank": 64,
    }
    path = tmp_path_factory.mktemp("drafting")
    (path / "config.json").write_text(json.dumps(fields))
    for file in NANO.glob("token*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    for name in ("encoding.json", "generation_config.json"):
        (path / name).write_bytes((NANO / name).read_bytes())
    return path


def texts(folder: Path, temperature: float = 0.0, **changes: object) -> list[list[int]]:
    """Answers to prompts that run side by side, each with a seed of its client."""
    settings = Settings(
        model_path=str(folder), load_format="dummy", threads=1, max_running_requests=4,
        max_total_tokens=4096, chunked_prefill_size=256, speculative_cost_table=str(folder / "costs.json"),
        **changes,  # type: ignore[arg-type]
    )  # fmt: skip
    return anyio.run(_texts, settings, temperature)


async def _texts(settings: Settings, temperature: float) -> list[list[int]]:
    rng = np.random.default_rng(0)
    entries = tuple(
        Entry(
            sink=0,
            prompt=rng.integers(2, 8000, prompt).astype(np.int32).tobytes(),
            sampling=Sampling(
                max_new_tokens=answer,
                temperature=temperature,
                top_p=0.9,
                ignore_eos=True,
                seed=answer,
                seeded=True,
            ),
        )
        for prompt, answer in SIZES
    )
    found: dict[int, list[int]] = defaultdict(list)
    async with local_engine(settings) as engine:
        group = await engine.submit(list(entries))
        while deltas := await group.take():
            for delta in deltas:
                assert not delta.message
                found[group.index[delta.request_id]] += delta.token_ids
    return [found[i] for i in range(len(entries))]


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    """Without drafts."""
    return texts(folder)


@pytest.mark.parametrize("mode", ["static", "cap-accept", "compact"])
def test_drafts_leave_every_text_as_it_is(
    folder: Path, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    drafted: list[int] = []
    judge = Acceptance.accept

    def counting(self: Acceptance, logits: Tensor, rows: VerifyRows, mask: None) -> Accepted:
        drafted.append(int(rows.verify_lens.max()))
        return judge(self, logits, rows, mask)

    monkeypatch.setattr(Acceptance, "accept", counting)
    assert [len(text) for text in plain] == [answer for _, answer in SIZES]
    assert texts(folder, speculative_algorithm="DSPARK", speculative_verify_mode=mode) == plain
    assert max(drafted) == 6
    assert len(drafted) > 20


def test_a_seed_gives_the_text_of_plain_decoding_in_any_company(folder: Path) -> None:
    plain = texts(folder, 0.4)
    assert plain != texts(folder)
    drafted = texts(folder, 0.4, speculative_algorithm="DSPARK", speculative_verify_mode="compact")
    assert drafted == plain
