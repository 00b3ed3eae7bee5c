"""The DSpark draft gives what a plain float64 reference gives over the whole history.

Tolerance 1e-5 of the largest logit: float32 against float64, positions up to 300.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model.draft import Drafted, DraftRows, InjectRows
from tests.model.draft_case import DSPARK, FIELDS, OPS, Case
from tests.model.draft_reference import DSparkReference

LENGTHS = (1, 5, 127, 128, 129, 133, 300)


def reference(case: Case) -> DSparkReference:
    return DSparkReference(case.fields, case.weights, rounding=case.rounding == "simulated")


def check(case: Case, drafted: Drafted, slots: list[int], valid_from: list[int] | None = None) -> None:
    """Every row of `drafted` against the reference."""
    assert drafted.logits is not None
    plain = reference(case)
    for row, slot in enumerate(slots):
        since = valid_from[row] if valid_from else 0
        tokens, survival, logits = plain.draft(
            case.history[slot], since, case.anchor(slot), case.drafter.block
        )
        difference = (drafted.logits[row] - logits).abs().max()
        assert difference < 1e-5 * max(1.0, float(logits.abs().max())), (slot, float(difference))
        assert drafted.ids[row].tolist() == tokens
        assert (drafted.survival[row] - survival).abs().max() < 1e-5


@pytest.mark.parametrize("ops", OPS)
def test_every_length_equals_the_reference_alone_and_all_of_them_in_one_batch(ops: str) -> None:
    case = Case(ops=ops)
    for slot, length in enumerate(LENGTHS, 1):
        case.request(slot, length, seed=slot, pieces=(1, 7, 64, 128, 3))
        check(case, case.run([slot]), [slot])
    slots = list(range(len(LENGTHS), 0, -1))
    check(case, case.run(slots), slots)


@pytest.mark.parametrize("ops", OPS)
def test_rows_before_the_first_valid_one_are_not_looked_at(ops: str) -> None:
    """As after a prefix hit: the ring has seen the last rows only; the others are still NaN."""
    case = Case(ops=ops)
    since = {1: (300, 290), 2: (129, 1), 3: (129, 128), 4: (200, 72), 5: (200, 73), 6: (5, 4)}
    for slot, (length, begin) in since.items():
        case.request(slot, length, seed=slot, begin=begin)
    slots, valid = list(since), [begin for _, begin in since.values()]
    check(case, case.run(slots, valid), slots, valid)


def test_a_slot_of_a_former_request_gives_nothing_to_the_next_one() -> None:
    case = Case()
    case.request(3, 300, seed=1)
    case.run([3])
    case.request(3, 20, seed=2)
    check(case, case.run([3]), [3])


def test_rows_committed_round_by_round_equal_rows_injected_at_once() -> None:
    """Rounds of 1 to 6 rows, each after a draft, over the ring's edge."""
    case, whole = Case(ops="native"), Case(ops="native")
    case.request(2, 160, seed=4, begin=160)
    full, tokens = case.history[2], case.next_tokens[2]
    at = 0
    for count in [110, *[1, 6, 3, 2, 5] * 2]:
        case.history[2], case.next_tokens[2] = full[:, : at + count], tokens[: at + count]
        case.inject([(2, at, at + count)])
        at += count
        got = case.run([2])
        whole.request(2, at, seed=4, begin=at)
        whole.history[2], whole.next_tokens[2] = full[:, :at], tokens[:at]
        whole.inject([(2, max(0, at - 128), at)])
        want = whole.run([2])
        assert got.logits is not None
        assert want.logits is not None
        assert torch.equal(got.logits, want.logits)
    assert at == 144
    check(case, got, [2])


@pytest.mark.parametrize("ops", ["native", "tiles"])
def test_a_request_drafts_the_same_bits_alone_and_in_any_company(ops: str) -> None:
    case = Case(ops=ops)
    for slot, length in enumerate((300, 5, 128, 131, 64, 17, 250, 129), 1):
        case.request(slot, length, seed=slot, pieces=(128, 5))
    alone = {slot: case.run([slot]) for slot in range(1, 9)}
    for company in ([3, 1], [8, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8], [6, 7, 4, 3, 2]):
        together = case.run(company)
        for row, slot in enumerate(company):
            for name in ("ids", "survival", "logits"):
                mine, other = getattr(together, name)[row], getattr(alone[slot], name)[0]
                assert torch.equal(mine, other), (company, slot, name)


@pytest.mark.parametrize("ops", ["native", "tiles"])
def test_injected_rows_have_the_same_bits_in_any_company(ops: str) -> None:
    case, other = Case(ops=ops), Case(ops=ops)
    for own in (case, other):
        for slot in (1, 2, 3):
            own.request(slot, 40, seed=slot, begin=40)
    case.inject([(1, 0, 40), (2, 0, 40), (3, 0, 40)])
    for slot in (3, 1, 2):
        for first in range(0, 40, 8):
            other.inject([(slot, first, first + 8)])
    assert torch.equal(case.state.pool.nan_to_num(9.0), other.state.pool.nan_to_num(9.0))


def hidden_rows(case: Case, monkeypatch: pytest.MonkeyPatch, slot: int, block: Tensor | None) -> Tensor:
    """Streams [gamma, hc, H] after the last stage, with the block's input streams replaced if given."""
    seen: list[Tensor] = []
    layers = case.drafter.layers
    plain = type(layers).forward

    def forward(state: Any, streams: Tensor, *rest: Any) -> Tensor:
        seen.append(plain(layers, state, streams if block is None else block, *rest))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(layers, "forward", forward)
        case.run([slot])
    return seen[0]


def test_every_row_of_the_block_sees_every_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last row the first, and the first the last: attention in the block has no direction."""
    case = Case(ops="native")
    case.request(1, 133, seed=1)
    ids = torch.tensor([case.anchor(1), *[299] * 4])
    streams = case.model.streams(ids)
    before = hidden_rows(case, monkeypatch, 1, streams)
    assert torch.equal(before, hidden_rows(case, monkeypatch, 1, None))
    for row in range(5):
        changed = streams.clone()
        changed[row] += 0.5 * torch.randn(4, 64, generator=torch.Generator().manual_seed(row))
        moved = (hidden_rows(case, monkeypatch, 1, changed) - before).abs().amax((1, 2))
        assert bool((moved > 1e-4).all()), moved


@pytest.mark.parametrize("length", [5, 128, 129, 300])
def test_the_window_holds_the_last_128_rows_for_every_row_of_the_block(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    case = Case(ops="native")
    case.request(1, length, seed=1)
    before, kept = hidden_rows(case, monkeypatch, 1, None), case.history[1]
    for position in {0, length // 2, length - 1, *range(max(0, length - 130), max(0, length - 126))}:
        case.history[1] = kept.clone()
        case.history[1][:, position] += 1.0
        case.inject([(1, max(0, length - 128), length)])
        moved = (hidden_rows(case, monkeypatch, 1, None) - before).abs().amax((1, 2))
        assert bool((moved > 0).all() if position >= length - 128 else (moved == 0).all()), position


@pytest.mark.parametrize("kind", ["gated", "rnn"])
@pytest.mark.parametrize("ops", OPS)
def test_other_markov_heads_equal_the_reference_and_are_row_invariant(kind: str, ops: str) -> None:
    case = Case(fields=FIELDS | DSPARK | {"dspark_markov_head_type": kind}, ops=ops)
    for slot in (1, 2, 3):
        case.request(slot, 30 * slot, seed=slot)
    together = case.run([1, 2, 3])
    check(case, together, [1, 2, 3])
    if ops != "torch":
        assert together.logits is not None
        for row, slot in enumerate((1, 2, 3)):
            alone = case.run([slot])
            assert alone.logits is not None
            assert torch.equal(alone.logits[0], together.logits[row])
            assert torch.equal(alone.survival[0], together.survival[row])


@pytest.mark.parametrize("block", range(1, 9))
def test_any_block_runs_with_a_draft_of_five(block: int) -> None:
    case = Case(block=block, ops="native")
    case.request(1, 131, seed=1)
    case.request(2, 3, seed=2)
    drafted = case.run([2, 1])
    assert drafted.ids.shape == (2, block)
    check(case, drafted, [2, 1])


@pytest.mark.parametrize(
    "change",
    [
        {"dspark_sts_temperatures": [0.5, 1.0, 2.0, 4.0, 0.25]},
        {"confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 1},
    ],
)
@pytest.mark.parametrize("block", [3, 5, 7])
def test_optional_fields_mean_what_the_reference_says(change: dict[str, Any], block: int) -> None:
    case = Case(fields=FIELDS | DSPARK | change, block=block)
    case.request(1, 50, seed=1)
    check(case, case.run([1]), [1])


def test_cached_latents_are_rounded_as_the_targets_are() -> None:
    """Tolerance 1e-2: a value at a rounding edge may fall either way."""
    fields = FIELDS | DSPARK | {"qk_rope_head_dim": 32, "head_dim": 96}
    case = Case(fields=fields, rounding="simulated")
    case.request(1, 140, seed=1)
    drafted, plain = case.run([1]), reference(case)
    exact = DSparkReference(case.fields, case.weights)
    _, _, want = plain.draft(case.history[1], 0, case.anchor(1), 5)
    _, _, unrounded = exact.draft(case.history[1], 0, case.anchor(1), 5)
    assert drafted.logits is not None
    off = (drafted.logits[0] - want).abs().max()
    assert off < 1e-2
    assert off < 0.1 * (drafted.logits[0] - unrounded).abs().max()


def test_each_choice_is_asked_for_in_order_and_biases_the_next_position() -> None:
    case = Case(ops="native")
    case.request(1, 40, seed=1)
    case.request(2, 60, seed=2)
    forced = torch.tensor([[7, 0, 299, 12, 5], [250, 7, 7, 1, 9]])
    asked: list[tuple[int, Tensor]] = []

    def choose(k: int, z: Tensor) -> Tensor:
        asked.append((k, z.clone()))
        return forced[:, k]

    drafted = case.run([1, 2], choose=choose)
    assert [k for k, _ in asked] == [0, 1, 2, 3, 4]
    assert torch.equal(drafted.ids, forced)
    assert drafted.logits is not None
    assert torch.equal(torch.stack([z for _, z in asked], 1), drafted.logits)
    for row, slot in enumerate((1, 2)):
        tokens = forced[row].tolist()
        _, survival, logits = reference(case).draft(
            case.history[slot], 0, case.anchor(slot), 5, lambda k, _, tokens=tokens: tokens[k]
        )
        assert (drafted.logits[row] - logits).abs().max() < 1e-5 * logits.abs().max()
        assert (drafted.survival[row] - survival).abs().max() < 1e-5


@pytest.mark.parametrize("ops", OPS)
def test_no_request_is_drafted_for_and_no_row_injected_without_harm(ops: str) -> None:
    case = Case(ops=ops)
    none = torch.empty(0, dtype=torch.int64)
    case.drafter.inject(case.state, InjectRows(none, none), torch.empty(3, 0, 64))
    columns = (np.empty(0, np.int64),) * 3
    drafted = case.drafter.draft(case.state, DraftRows(*columns, none), keep_logits=True)
    assert drafted.ids.shape == (0, 5)
    assert drafted.survival.shape == (0, 5)
    assert drafted.logits is not None
    assert drafted.logits.shape == (0, 5, 300)
    assert bool(case.state.pool.isnan().all())


def test_padding_rows_go_to_the_sink_and_change_no_request() -> None:
    case = Case(ops="native")
    case.request(1, 20, seed=1)
    before = case.run([1])
    zeros = torch.zeros(6, dtype=torch.int64)
    case.drafter.inject(case.state, InjectRows(zeros, zeros), torch.full((3, 6, 64), torch.nan))
    after = case.run([1])
    assert before.logits is not None
    assert after.logits is not None
    assert torch.equal(before.logits, after.logits)


def test_drafting_leaves_injected_rows_as_they_are_and_logits_are_kept_on_demand() -> None:
    case = Case(ops="native")
    case.request(1, 133, seed=1)
    ring = case.state.pool.view(3, 9, 133, -1)[:, 1, :128].clone()
    case.run([1])
    assert torch.equal(ring, case.state.pool.view(3, 9, 133, -1)[:, 1, :128])
    rows = DraftRows(np.array([1]), np.array([133]), np.array([0]), torch.tensor([5]))
    assert case.drafter.draft(case.state, rows).logits is None
