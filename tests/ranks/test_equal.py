"""Two ranks that share the experts give the logits of one rank with all traffic, whatever each does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.actors.schedule import smallest_at_least
from engine.model.groups import ALONE
from tests.golden.driver import Driver
from tests.ranks.workers import SMALL, Build, Groupsizes, Workers, step

Round = tuple[Groupsizes, Groupsizes]

SMALL_NATIVE = Build(tuple(SMALL.items()))
SLOTS = (range(1, 5), range(5, 9))


def rounds(plan: Sequence[tuple[Sequence[int], Sequence[int]]], vocabulary: int, seed: int) -> list[Round]:
    """Rounds with random tokens; the plan has the token counts of each rank's requests, 0 leaves one out."""
    drawn = random.Random(seed)
    return [
        tuple(
            [
                (slot, [drawn.randrange(2, vocabulary) for _ in range(count)])
                for slot, count in zip(slots, counts, strict=False)
                if count
            ]
            for slots, counts in zip(SLOTS, part, strict=True)
        )  # type: ignore[misc]
        for part in plan
    ]


def told(parts: Round) -> tuple[tuple[int, int, int], ...]:
    """What the ranks agree on: requests, tokens, rows that need logits, here all of them."""
    counts = [sum(len(tokens) for _, tokens in part) for part in parts]
    return tuple((len(part), count, count) for part, count in zip(parts, counts, strict=True))


def run_all(workers: Workers, parts: Round, captured: Sequence[int]) -> list[Any]:
    """Logits of both ranks' requests in a step, padded to the smallest captured size that holds it."""
    ranks = told(parts)
    bucket = smallest_at_least(max(tokens for _, tokens, _ in ranks), captured)
    both = workers.each([("step", part, ranks, bucket) for part in parts])
    return [logits for part in both for logits in part]


def differences(workers: Workers, build: Build, script: Sequence[Round]) -> Iterator[float]:
    """Of each round, the largest difference of any logit from the one rank that runs all of it."""
    alone = Driver(build.model(ALONE))
    for parts in script:
        expected = step(alone, [*parts[0], *parts[1]])
        found = run_all(workers, parts, ())
        assert len(found) == len(expected)
        yield max((float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True)), default=0.0)


# Prompts beside decodes, chunks of unequal size, a rank without work, more requests on one than on the other.
MIXED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((130,), ()),
    ((1,), (40, 3)),
    ((1, 7), (1, 1)),
    ((), (200, 1)),
    ((128, 1, 5), ()),
    ((1, 1, 1), (1, 1, 31)),
    ((1,), (1, 1, 1, 1)),
    ((), (1,)),
]


@pytest.mark.parametrize(
    "build",
    [
        SMALL_NATIVE,
        Build(tuple(SMALL.items()), split_head=True),
        Build(tuple(SMALL.items()), split_experts=False, split_head=True),
        Build(tuple(SMALL.items()), split_experts=False),
        Build((("compress_ratios", [0, 4, 128, 4]), ("num_hidden_layers", 4)), split_head=True),
    ],
    ids=["experts", "experts-head", "head", "nothing", "shipped"],
)
def test_logits_are_bit_equal_to_one_rank(workers: Workers, build: Build) -> None:
    workers.both("build", build)
    vocabulary = dict(build.changes).get("vocab_size", 8192)
    assert list(differences(workers, build, rounds(MIXED, vocabulary, 1))) == [0.0] * len(MIXED)


@pytest.mark.parametrize("deterministic", [True, False], ids=["rows", "blocks"])
def test_padding_to_a_captured_size_changes_no_bit(workers: Workers, deterministic: bool) -> None:
    """I12: rows of no request get no expert, and what they compute reaches nobody."""
    build = Build(tuple(SMALL.items()), deterministic=deterministic)
    script = rounds(MIXED, 256, 3)
    workers.both("build", build)
    eager = [run_all(workers, parts, ()) for parts in script]
    workers.both("empty")
    padded = [run_all(workers, parts, (8, 64, 256)) for parts in script]
    assert all(
        np.array_equal(a, b)
        for one, two in zip(eager, padded, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(
    ("ops", "deterministic", "tolerance"),
    [("tiles", True, 0.0), ("plain", False, 2e-5), ("native", False, 2e-5)],
)
def test_what_depends_on_its_batch_differs_by_rounding_alone(
    workers: Workers, ops: str, deterministic: bool, tolerance: float
) -> None:
    """Row-invariant tiles are bit-equal; without it one rank's own batch rounds otherwise than two halves."""
    build = Build(tuple(SMALL.items()), ops, split_head=not deterministic, deterministic=deterministic)
    workers.both("build", build)
    assert max(differences(workers, build, rounds(MIXED, 256, 2))) <= tolerance


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(*[st.lists(st.sampled_from([0, 1, 1, 1, 2, 9, 33, 90]), max_size=4)] * 2),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 1000),
)
def test_any_traffic_is_bit_equal(workers: Workers, plan: list[Any], seed: int) -> None:
    """I9: however the work lies on the ranks, and whoever has none."""
    build = Build(tuple(SMALL.items()), split_head=bool(seed % 2))
    workers.both("build", build)
    assert max(differences(workers, build, rounds(plan, 256, seed))) == 0.0


def test_experts_without_rows_and_ranks_whose_experts_nobody_wants(workers: Workers) -> None:
    """A table that sends every token to the first rank's experts, or to one alone."""
    build = Build((*SMALL.items(), ("num_hash_layers", 4), ("n_routed_experts", 128)))
    workers.both("build", build)
    # A token's row wants three neighbours of 128 experts: mostly of one rank, and all others have no row.
    script = [
        tuple([[(slot, [5] * n)] if n else [] for slot, n in ((1, a), (5, b))])
        for a, b in ((1, 0), (0, 1), (1, 1), (3, 0))
    ]
    assert list(differences(workers, build, script)) == [0.0] * 4  # type: ignore[arg-type]


def test_collectives_keep_bits(workers: Workers) -> None:
    values = [np.array([[np.nan, -0.0], [1e-45, rank]], np.float32) for rank in range(2)]
    every = workers.each([("collective", "gather", value) for value in values])
    assert all(got.tobytes() == np.stack(values).tobytes() for got in every)
    swapped = workers.each([("collective", "swap", value) for value in values])
    for rank, got in enumerate(swapped):
        assert got.tobytes() == np.stack([value[rank] for value in values]).tobytes()
