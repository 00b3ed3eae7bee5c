"""The shipped checkpoint: it loads, holds what its formats can hold, and its indexer finds what is needed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import training.attention
from engine.config import NANO
from engine.model.checkpoint import load_checkpoint
from engine.model.quant import E2M1_VALUES, FP4_GROUP
from engine.model.tokenizer import load_tokenizer
from training.geometry import Geometry
from training.model import Model
from training.naming import from_checkpoint
from training.recall import recall_at
from training.tasks.draw import Draw

DISTANCE = 1000
ROWS = 2
PARAGRAPHS = (
    "The queue holds requests in the order in which they came, and gives the oldest one a page first.",
    "A reader that is late sees the value that was written last; it never waits for the writer.",
    "Each file begins with a header of sixteen bytes, which names the format and the number of records.",
    "When the lamp is turned off, the clock goes on and the door stays shut until the morning.",
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Every tensor of the shipped checkpoint in float32."""
    return load_checkpoint(NANO, torch.float32, torch.device("cpu"), progress=lambda *_: None)[1]


@pytest.fixture(scope="module")
def model(weights: dict[str, Tensor]) -> Model:
    """The training implementation with the shipped weights."""
    model = Model(Geometry()).requires_grad_(False)
    from_checkpoint(model, weights)
    return model


def test_every_shard_is_under_16_mib() -> None:
    shards = sorted(Path(NANO).glob("*.safetensors"))
    assert shards
    assert all(shard.stat().st_size < 16 * 2**20 for shard in shards)


def test_the_model_has_21_to_29_million_parameters(model: Model) -> None:
    assert 21e6 < sum(p.numel() for p in model.parameters()) < 29e6


def test_hash_tables_name_distinct_experts_evenly(weights: dict[str, Tensor]) -> None:
    for layer in range(3):
        table = weights[f"layers.{layer}.ffn.gate.tid2eid"]
        assert (table[:, 0] != table[:, 1]).all()
        load = torch.bincount(table.flatten().long(), minlength=8)
        assert load.min() > 0.8 * load.float().mean()


def test_experts_hold_fp4_values(weights: dict[str, Tensor]) -> None:
    """Over each group's own power of two, every magnitude is one that e2m1 has."""
    groups = weights["layers.4.ffn.experts.3.w2.weight"].unflatten(-1, (-1, FP4_GROUP))
    top = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True) / 6)))
    assert torch.isin((groups / top).abs(), torch.tensor(E2M1_VALUES)).all()


def test_recall_at_1000_beats_random_selection(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 of some 280 entries selected, the indexer's choice brings the fact back; chance does not."""
    tokenizer = load_tokenizer(NANO)
    rows = [
        recall_at(Draw("recall", seed, heldout=True), tokenizer, PARAGRAPHS, DISTANCE) for seed in range(ROWS)
    ]
    chosen = recall_nats(model, rows)
    monkeypatch.setattr(training.attention, "best_entries", random_entries)
    by_chance = recall_nats(model, rows)
    assert chosen < by_chance - 1.0, f"{chosen:.2f} nats chosen, {by_chance:.2f} by chance"


def random_entries(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """As many visible entries as top-k selects, by lot."""
    lots = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0))
    lots = lots.masked_fill(~visible, -1.0)
    return visible & (lots >= torch.topk(lots, topk, -1).values[..., -1:])


def recall_nats(model: Model, rows: list[tuple[list[int], int]]) -> float:
    """Mean nats of the values' tokens at their second mention."""
    length = -(-max(len(ids) for ids, _ in rows) // 128) * 128
    batch = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, (ids, _) in zip(batch, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    logs = torch.log_softmax(model.logits(batch, "select"), -1)
    nats = [-logs[i, t - 1, ids[t]] for i, (ids, at) in enumerate(rows) for t in range(at, len(ids))]
    return float(torch.stack(nats).mean())
