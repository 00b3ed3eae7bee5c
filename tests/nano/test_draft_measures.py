"""What the draft is trained and judged by, against slow references; and the shipped draft on greedy texts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import NANO
from engine.model.checkpoint import load_checkpoint
from training.draft_evaluate import (
    accepted_runs,
    area_under_curve,
    calibration_error,
    fit_temperatures,
    measure,
    sigmoid,
    survival,
    walk,
)
from training.draft_export import draft_from_checkpoint
from training.draft_generate import load_target
from training.draft_loss import DECAY, block_targets, choose_blocks, losses, text_starts
from training.draft_model import Draft, DraftShape
from training.draft_record import gates
from training.draft_trials import rollout
from training.geometry import Geometry

BOS, EOS, BLOCK = 0, 1, 5
CPU = torch.device("cpu")


def rows() -> tuple[Tensor, Tensor]:
    """Two rows of texts of 7 to 60 tokens that begin with BOS; a third of the tokens is wanted, in runs."""
    random = np.random.default_rng(3)
    ids = torch.from_numpy(random.integers(5, 900, (2, 256)))
    wanted = torch.from_numpy((np.sin(np.arange(512) / 9.0) > 0).astype(np.float32)).view(2, 256)
    for row in ids:
        at = 0
        while at < 256:
            row[at] = BOS
            at += int(random.integers(7, 60))
    return ids, wanted


def test_labels_end_with_the_text_the_row_and_the_first_unwanted_token() -> None:
    ids, wanted = rows()
    starts = text_starts(ids, BOS)
    blocks = choose_blocks(wanted, starts, 24, torch.Generator().manual_seed(1))
    targets = block_targets(ids, wanted, starts, blocks, BLOCK)
    weights = targets.weights.view(2, -1, BLOCK)
    labels, previous = targets.labels.view(2, -1, BLOCK), targets.previous.view(2, -1, BLOCK)
    found = 0
    for row in range(2):
        for number, anchor in enumerate(blocks.anchors[row].flatten().tolist()):
            alive = True
            for k in range(BLOCK):
                at = anchor + 1 + k
                alive = alive and at < 256 and bool(wanted[row, at] > 0)
                alive = alive and BOS not in ids[row, anchor + 1 : at + 1].tolist()
                assert weights[row, number, k] == pytest.approx(np.exp(-k / DECAY) if alive else 0.0)
                if alive:
                    found += 1
                    assert (labels[row, number, k], previous[row, number, k]) == (
                        ids[row, at],
                        ids[row, at - 1],
                    )
                    assert targets.seen.view(2, -1, BLOCK)[row, number, k] == row * 256 + at - 1
    assert found > 100


def test_anchors_are_distinct_and_precede_wanted_labels_where_there_are_enough() -> None:
    ids, wanted = rows()
    starts = text_starts(ids, BOS)
    blocks = choose_blocks(wanted, starts, 24, torch.Generator().manual_seed(2))
    for row in range(2):
        for chunk, anchors in enumerate(blocks.anchors[row].tolist()):
            assert len(set(anchors)) == 24
            assert all(chunk * 128 <= anchor < chunk * 128 + 128 for anchor in anchors)
            assert all(wanted[row, anchor + 1] > 0 and ids[row, anchor + 1] != BOS for anchor in anchors)


def test_the_loss_is_cross_entropy_total_variation_and_doubt() -> None:
    shape = DraftShape(rank=8)
    draft = Draft(Geometry(vocab_size=64), shape).requires_grad_(False)
    generator = torch.Generator().manual_seed(4)
    for parameter in draft.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    hidden, seen = torch.randn(2, 12, 256, generator=generator).unbind()
    head = torch.randn(64, 256, generator=generator) * 0.1
    labels, previous = torch.randint(64, (2, 12), generator=generator).unbind()
    weights = torch.rand(12, generator=generator)
    total, accepted, estimate = losses(draft, hidden, seen, head, labels, previous, weights)
    bias = draft.markov_embed.weight[previous] @ draft.markov_head.weight.T
    own = torch.log_softmax(draft.norm(hidden) @ head.T + bias, -1)
    wanted = torch.softmax(seen @ head.T, -1)
    distance = F.l1_loss(own.exp(), wanted, reduction="none").sum(-1)
    chance = torch.minimum(own.exp(), wanted).sum(-1)
    torch.testing.assert_close(accepted, chance, atol=1e-5, rtol=1e-5)
    doubt = -(chance * estimate.log() + (1 - chance) * (1 - estimate).log())
    each = 0.1 * F.nll_loss(own, labels, reduction="none") + 0.9 * distance + doubt
    torch.testing.assert_close(total, (each * weights).sum() / weights.sum(), atol=1e-4, rtol=1e-4)


def test_a_walk_is_round_after_round() -> None:
    """Runs by anchor, an answer of eleven tokens from position 3 on, EOS last."""
    runs = np.zeros((1, 20), dtype=np.int64)
    runs[0, [3, 5, 6, 12]] = [1, 0, 5, 4]
    found = walk(runs, np.array([[0, 0, 3, 14, 0, 0]]), BLOCK)
    # 3 -> 5 (one accepted), 5 -> 6 (none), 6 -> 12 (all), 12 -> 13: one of four still belongs to the text.
    assert (found.rounds, found.emitted) == (4, 10)
    assert found.counts.tolist() == [1, 2, 0, 0, 0, 1]


def test_the_fitted_temperatures_undo_known_ones() -> None:
    random = np.random.default_rng(5)
    true = np.array([2.0, 0.5, 1.0, 1.6, 3.2])
    doubt = random.normal(1.0, 2.0, (60_000, 5))
    accepted = (random.random(doubt.shape) < sigmoid(doubt / true)).cumprod(1)
    fitted = np.array(fit_temperatures(doubt[::2], accepted[::2]))
    assert np.abs(np.log(fitted / true)).max() < 0.3
    before, after = survival(doubt[1::2], [1.0] * 5), survival(doubt[1::2], fitted.tolist())
    for k in range(5):
        assert calibration_error(after[:, k], accepted[1::2, k]) < 0.02
    assert calibration_error(before[:, 0], accepted[1::2, 0]) > 0.05


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    random = np.random.default_rng(6)
    score = random.integers(0, 9, 80).astype(float)
    outcome = random.random(80) < sigmoid(score - 4)
    pairs = [(a > b) + 0.5 * (a == b) for a in score[outcome] for b in score[~outcome]]
    assert area_under_curve(score, outcome) == pytest.approx(np.mean(pairs))


def test_the_shipped_draft_is_accepted_on_recorded_greedy_texts() -> None:
    """At least 3.2 tokens a round, walked and decoded; the record's own checks are passed."""
    record = json.loads((Path(NANO) / "draft.json").read_text())
    target = load_target(Path(NANO), CPU)
    _, weights = load_checkpoint(NANO, torch.float32, CPU, draft=True, progress=lambda *_: None)
    draft = Draft(Geometry(), DraftShape()).requires_grad_(False)
    draft_from_checkpoint(draft, weights)
    assert record["shape"]["taps"] == list(draft.shape.taps)
    texts = record["samples"][::3]
    ids = torch.full((len(texts), 128), 2)
    wanted = torch.zeros(len(texts), 128)
    places = []
    for row, text in enumerate(texts):
        answer, stop = len(text["prompt"]), len(text["prompt"]) + len(text["reply"])
        ids[row, :stop] = torch.tensor(text["prompt"] + text["reply"])
        wanted[row, answer:stop] = 1.0
        places.append((row, 0, answer, stop))
    runs = accepted_runs(measure(target, draft, ids, wanted, BOS), True, 0)
    walked = walk(runs, np.array(places), BLOCK)
    assert walked.length > 3.2
    alone = walk(runs, np.array(places[:1]), BLOCK)
    reply = len(texts[0]["reply"])
    assert rollout(target, draft, texts[0]["prompt"], reply - 1, EOS) == (alone.rounds, reply - 1)


def test_a_draft_that_ignores_its_context_fails_its_checks() -> None:
    record = json.loads((Path(NANO) / "draft.json").read_text())
    same = {"chance_given_before": [0.9] * 5}
    found = {
        "plain": same,
        "no_markov": same,
        "shuffled": same,
        "overfit": {"tau": 1.2},
        "rollout": {"length": 2.0, "walked_length": 4.0},
        "bench_greedy": record["acceptance"]["bench_greedy"],
        "confidence": {"auc_all": 0.5, "bias_at_temperature_1": 0.2},
    }
    checks = {name: check["passed"] for name, check in gates(found, BLOCK).items()}
    assert sum(checks.values()) == 1
    assert checks["decoding_within_a_tenth_of_tau"]
