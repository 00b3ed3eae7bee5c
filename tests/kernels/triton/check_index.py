"""Index scores and the selection of entries against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton import oracle_compress as oracle
from engine.kernels.triton.entry_rows import entry_rows
from engine.kernels.triton.faults import Fault, no_faults
from engine.kernels.triton.index_queries import code_queries, round_queries
from engine.kernels.triton.index_scores import ScoreShape, index_scores
from engine.kernels.triton.select_entries import select_in_order, select_rows
from engine.kernels.triton_ops import TritonOps
from engine.model.ops import TorchOps
from tests.kernels.triton.cases import DEVICE, distance, seeded

FP32, FP8 = 1e-5, 1e-3
"""Float32 sums in another order, of products that are exact; the matrix unit keeps 14 bits of sums in FP8."""
ROUNDED = 1e-2
"""As FP32, with a rounding to FP4 or FP8 that falls to the other side for one value in hundreds."""
POOL_ROWS = 300
SMALL = ScoreShape(16, 2, 2, 4, 2)


class Scored:
    """Queries, weights and a pool of keys of 32 channels."""

    def __init__(self, blocks: int, width: int, heads: int, entries: int, dtype: torch.dtype) -> None:
        generator = seeded(entries)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE)

        self.q, self.weights = drawn(blocks, width, heads, 32).to(dtype), drawn(blocks, width, heads)
        self.keys = drawn(POOL_ROWS, 32).to(dtype)
        self.scales = drawn(POOL_ROWS).abs() if dtype == torch.float8_e4m3fn else None
        self.rows = torch.randint(1, POOL_ROWS, (blocks, entries), generator=generator, device=DEVICE)
        counts = torch.randint(0, entries + 1, (blocks, width), generator=generator, device=DEVICE)
        self.counts = counts
        column = torch.arange(entries, device=DEVICE)
        self.bias = torch.zeros(blocks, width, entries, device=DEVICE)
        self.bias.masked_fill_(column >= counts.unsqueeze(2), -torch.inf)

    def scores(self, seen: Tensor, shape: ScoreShape | None, faults: Tensor) -> Tensor:
        return index_scores(self.q, self.weights, self.keys, self.scales, self.rows, seen, faults, shape)

    def wanted(self, seen: Tensor) -> Tensor:
        return oracle.index_scores(self.q, self.weights, self.keys, self.scales, self.rows, seen)


@pytest.mark.parametrize(("page_rows", "entries"), [(64, 130), (2, 5), (2, 0)])
def test_rows_of_entries_follow_their_pages(page_rows: int, entries: int) -> None:
    pages = torch.tensor([[5, 2, 9], [1, 0, 0], [0, 0, 0]], device=DEVICE)
    visible, faults = torch.tensor([entries, min(entries, page_rows), 0], device=DEVICE), no_faults(DEVICE)
    place = torch.arange(entries, device=DEVICE)
    wanted = pages[:, place // page_rows] * page_rows + place % page_rows
    wanted = wanted.masked_fill(place >= visible.unsqueeze(1), 0).int()
    assert torch.equal(entry_rows(pages, visible, entries, page_rows, 10, faults), wanted)
    assert int(faults) == 0


@pytest.mark.parametrize(
    ("page", "visible", "fault"),
    [(10, 3, Fault.KEY_ROW), (-1, 3, Fault.KEY_ROW), (0, 3, Fault.KEY_ROW), (3, 6, Fault.LENGTH)],
)
def test_a_page_outside_is_told_and_gives_no_row(page: int, visible: int, fault: Fault) -> None:
    faults = no_faults(DEVICE)
    pages, seen = torch.tensor([[4, page, 7]], device=DEVICE), torch.tensor([visible], device=DEVICE)
    rows = entry_rows(pages, seen, 5, 2, 10, faults)
    assert rows[0, :3].tolist() == [8, 9, 6 if page == 3 else 0]
    assert int(faults) == fault


def same(out: Tensor, wanted: Tensor, tolerance: float = FP32) -> bool:
    """Minus infinity at the same places, and the rest within the tolerance."""
    unseen = wanted.isneginf()
    alike = torch.equal(out.isneginf(), unseen)
    return alike and distance(out.masked_fill(unseen, 0), wanted.masked_fill(unseen, 0)) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("blocks", "width", "heads", "entries", "shape"),
    [
        (1, 1, 64, 70, None),
        (2, 3, 6, 37, SMALL),
        (1, 3, 16, 129, None),
        (1, 2, 4, 0, None),
        (0, 1, 4, 9, None),
    ],
)
def test_scores(
    blocks: int, width: int, heads: int, entries: int, shape: ScoreShape | None, dtype: torch.dtype
) -> None:
    case, faults = Scored(blocks, width, heads, entries, dtype), no_faults(DEVICE)
    for seen in (case.counts, case.bias):
        out = case.scores(seen, shape, faults)
        assert out.shape == (blocks, width, entries)
        assert same(out, case.wanted(seen), FP8 if case.scales is not None else FP32)
    assert int(faults) == 0


def test_a_key_row_outside_is_told_and_scores_nothing() -> None:
    case, faults = Scored(2, 1, 4, 40, torch.bfloat16), no_faults(DEVICE)
    case.counts[:] = 40
    case.rows[0, :2] = torch.tensor([0, -1], device=DEVICE)
    assert same(case.scores(case.counts, SMALL, faults), case.wanted(case.counts))
    assert int(faults) == 0
    case.rows[0, 5], case.rows[1, 39] = POOL_ROWS, -2
    out = case.scores(case.counts, SMALL, faults)
    assert same(out, case.wanted(case.counts))
    assert out.isneginf().nonzero().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 5], [1, 0, 39]]
    assert int(faults) == Fault.KEY_ROW


def test_shapes_of_scoring_are_checked() -> None:
    case, faults = Scored(1, 2, 4, 8, torch.bfloat16), no_faults(DEVICE)
    with pytest.raises(ShapeMismatch, match="seen"):
        case.scores(case.bias[:, :1], None, faults)
    case.scales = torch.ones(POOL_ROWS, device=DEVICE)
    with pytest.raises(ShapeMismatch, match="scales"):
        case.scores(case.counts, None, faults)
    case.keys = case.keys.float()
    with pytest.raises(ShapeMismatch, match="float32"):
        case.scores(case.counts, None, faults)


@pytest.mark.parametrize(("tokens", "heads", "wide"), [(0, 4, 32), (3, 5, 128), (1, 70, 32)])
def test_queries_are_turned_transformed_and_rounded(tokens: int, heads: int, wide: int) -> None:
    generator = seeded(tokens)
    q = torch.randn(tokens, heads, wide, generator=generator, device=DEVICE).bfloat16()
    angles = torch.randn(tokens, 1, 8, generator=generator, device=DEVICE) * 9
    turns, weights = torch.polar(torch.ones_like(angles), angles), torch.ones(tokens, heads, device=DEVICE)
    assert distance(round_queries(q, turns), oracle.round_queries(q, turns)) < ROUNDED
    codes, scales = code_queries(q, turns, weights * 2)
    assert distance(codes.float() * scales.unsqueeze(2) / 2, oracle.code_queries(q, turns)) < ROUNDED
    with pytest.raises(ShapeMismatch):
        round_queries(q.float(), turns)


def test_chosen_queries_are_those_of_all() -> None:
    generator = seeded(1)
    q = torch.randn(5, 3, 64, generator=generator, device=DEVICE).bfloat16()
    angles = torch.randn(5, 1, 8, generator=generator, device=DEVICE) * 9
    turns = torch.polar(torch.ones_like(angles), angles)
    weights, chosen = torch.rand(5, 3, device=DEVICE), torch.tensor([4, 0, 0, 1, 3, 2], device=DEVICE)
    assert torch.equal(round_queries(q, turns, chosen), round_queries(q, turns)[chosen])
    some, every = code_queries(q, turns, weights, chosen), code_queries(q, turns, weights)
    assert torch.equal(some[0].float(), every[0].float()[chosen])
    assert torch.equal(some[1], every[1][chosen])
    parts = torch.stack([weights, -2 * weights, 4 * weights])
    assert torch.allclose(code_queries(q, turns, parts, chosen)[1], 3 * some[1])


def drawn(kind: str, rows: int, columns: int) -> Tensor:
    """Scores [rows, columns] of a kind that is hard in its own way."""
    generator = seeded(columns)
    scores = torch.randn(rows, columns, generator=generator, device=DEVICE)
    if kind == "ties":
        signs = torch.randn(scores.shape, generator=generator, device=DEVICE).sign()
        scores = scores.mul(2).round().relu() * signs  # zeros of both signs too
    if kind == "equal":
        scores[:] = -0.5
    if kind == "close":
        scores = 1 + scores.mul(40).round() * 2**-23
    if kind == "wide":
        scores = scores * torch.exp2(scores * 40)
        scores[:, ::7], scores[:, 5::20], scores[:, 9::30] = torch.inf, torch.nan, -torch.nan
    if kind != "all seen":
        scores[torch.rand(scores.shape, generator=generator, device=DEVICE) < 0.3] = -torch.inf
    if kind == "unseen":
        scores[:] = -torch.inf
        scores[1:, -1] = 3.0
    return scores


KINDS = ["all seen", "ties", "equal", "close", "wide", "unseen"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "count"), [(2, 200, 64), (1, 1, 1), (1, 33, 33), (1, 4096, 512)])
def test_selection_is_that_of_plain_torch(kind: str, rows: int, columns: int, count: int) -> None:
    scores = drawn(kind, rows, columns)
    assert torch.equal(select_in_order(scores, count), TorchOps().select_in_order(scores, count))


@pytest.mark.parametrize(("kind", "columns"), [("ties", 170), ("equal", 65), ("wide", 170), ("unseen", 65)])
def test_selection_in_parts_is_the_same(kind: str, columns: int) -> None:
    scores = drawn(kind, 2, columns).view(1, 2, columns)
    assert torch.equal(select_in_order(scores, 28, 64), TorchOps().select_in_order(scores, 28))


@pytest.mark.parametrize("columns", [60, 130])
def test_selected_rows_are_those_of_the_selected_entries(columns: int) -> None:
    scores = drawn("ties", 4, columns).view(2, 2, columns)
    scores[1, :, 9:] = -torch.inf
    rows = torch.randint(1, 1000, (2, columns), generator=seeded(columns), device=DEVICE)
    chosen = TorchOps().select_in_order(scores, 28)
    wanted = rows.unsqueeze(1).expand(-1, 2, -1).gather(2, chosen)
    seen = scores.isfinite().sum(2, keepdim=True)
    wanted = wanted.masked_fill(torch.arange(28, device=DEVICE) >= seen, 0)
    assert torch.equal(select_rows(scores, rows, 28, 64), wanted.int())


def test_nothing_is_selected_of_nothing() -> None:
    assert select_in_order(drawn("ties", 3, 8), 0).shape == (3, 0)
    assert select_in_order(drawn("ties", 0, 8), 4).shape == (0, 4)


def test_shapes_of_selection_are_checked() -> None:
    for scores, count, part in (
        (torch.zeros(2, 8), 9, 64), (torch.zeros(2, 100), 33, 64), (torch.zeros(8, 2).t(), 2, 64),
        (torch.zeros(2, 8).double(), 2, 64), (torch.zeros(2, 8), 2, 48),
    ):  # fmt: skip
        with pytest.raises(ShapeMismatch):
            select_in_order(scores, count, part)


def test_every_size_of_selection_is_run_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are powers of two from what is chosen to what holds all entries."""
    ops, ran = TritonOps(torch.device(DEVICE)), list[int]()
    select = ops.select_rows

    def noted(scores: Tensor, rows: Tensor, count: int) -> Tensor:
        ran.append(scores.shape[2])
        return select(scores, rows, count)

    monkeypatch.setattr(ops, "select_rows", noted)
    ops.warm(100, 16)
    assert sorted(set(ran)) == [16, 32, 64, 128]
    TorchOps().warm(100, 16)
