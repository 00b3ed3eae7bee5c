"""Each parameter, alone and with others, against the plain reference; reproducibility; isolation of rows."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadRequest
from engine.messages import Sampling
from engine.runner.filters import draw_filtered
from engine.runner.sampling import Rows
from tests.sampling.naive import distribution, processed

if TYPE_CHECKING:
    from tests.sampling.conftest import Bench


def random_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from((0.05, 0.7, 1.0, 3.0)),
    top_k=st.sampled_from((0, 2, 5, 63, 64, 300)),
    top_p=st.sampled_from((1e-6, 0.3, 0.9, 0.999, 1.0)),
    min_p=st.sampled_from((0.0, 0.01, 0.5, 1.0)),
    vocab_size=st.sampled_from((64, 300, 1500)),
)
@settings(max_examples=150, deadline=None)
def test_every_rank_is_drawn_at_its_own_share_of_u(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, vocab_size: int
) -> None:
    # A coarse grid makes ties common, within the kept set and at its end.
    logits = (random_logits(1, vocab_size, seed) * 2).round() / 2
    weights = ((logits - logits.max()) / temperature).exp()
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = distribution(logits[0].tolist(), sampling)
    ranked = sorted(range(vocab_size), key=lambda token: (-float(weights[0, token]), token))
    ends, reached = [], 0.0
    for token in ranked:
        reached += expected[token]
        ends.append(reached)
    count = sum(p > 0 for p in expected)
    picks = sorted({0, 1, count // 3, count // 2, count - 1} & set(range(count)))
    # The middle of a rank's share must give that rank's token; rounding moves only the ends of shares.
    middles = [ends[rank] - expected[ranked[rank]] / 2 for rank in picks]
    n = len(picks)
    found = draw_filtered(
        weights.expand(n, -1),
        torch.tensor(middles, dtype=torch.float64),
        torch.tensor([top_k if top_k < vocab_size else 0] * n),
        torch.tensor([top_p] * n),
        torch.tensor([min_p] * n),
        top_k if top_k < vocab_size else 0,
    )
    shares = [expected[ranked[rank]] for rank in picks]
    exact = [rank for rank, share in zip(picks, shares, strict=True) if share > 1e-6]
    assert found.tolist()[: len(exact)] == [ranked[rank] for rank in exact]


def test_edits_equal_the_reference_for_every_combination(bench: Bench) -> None:
    chance = random.Random(5)
    for trial in range(60):
        samplings, outputs, prompts = [], [], []
        for slot in range(1, 6):
            sampling = Sampling(
                64,
                temperature=0.0,
                min_new_tokens=chance.choice((0, 3, 9)),
                repetition_penalty=chance.choice((1.0, 1.3, 0.8)),
                frequency_penalty=chance.choice((0.0, 0.7, -0.5)),
                presence_penalty=chance.choice((0.0, 1.5, -1.0)),
                logit_bias=tuple(
                    (chance.randrange(64), chance.uniform(-5, 5)) for _ in range(chance.choice((0, 3)))
                ),
                stop_token_ids=(7,) if chance.random() < 0.5 else (),
            )
            prompt = [chance.randrange(64) for _ in range(chance.randrange(1, 20))]
            output = [chance.randrange(64) for _ in range(chance.randrange(0, 8))]
            bench.bind(slot, sampling, prompt, output)
            samplings.append(sampling)
            prompts.append(prompt)
            outputs.append(output)
        for step in range(3):
            logits = random_logits(5, 64, 100 * trial + step)
            positions = [len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]
            chosen = bench.sample(logits, range(1, 6), positions)
            for row in range(5):
                edited = processed(logits[row].tolist(), samplings[row], prompts[row], outputs[row], (1,))
                token = int(chosen.tokens[row])
                assert edited[token] == pytest.approx(max(edited), abs=1e-5)
                outputs[row].append(token)


MIX = (
    Sampling(64, temperature=0.0),
    Sampling(64, seed=1),
    Sampling(64, seed=2, top_k=5),
    Sampling(64, seed=3, top_p=0.9, temperature=0.7),
    Sampling(64, seed=4, min_p=0.05, presence_penalty=0.5),
    Sampling(64, seed=5, repetition_penalty=1.2, logit_bias=((9, 3.0),)),
    Sampling(64, seed=6, top_k=40, top_p=0.5, min_new_tokens=6),
)


def run_alone_or_together(bench: Bench, batches: list[list[int]], steps: int) -> dict[int, list[int]]:
    """Tokens of each slot, sampled step by step in the given batches of slots."""
    texts: dict[int, list[int]] = {}
    for slot, sampling in enumerate(MIX):
        bench.bind(slot, sampling, prompt=(3, 4, slot))
        texts[slot] = []
    for step in range(steps):
        rows = random_logits(len(MIX), bench.vocab_size, step)
        for batch in batches:
            found = bench.sample(rows[batch], batch, [3 + step] * len(batch))
            for slot, token in zip(batch, found.tokens.tolist(), strict=True):
                texts[slot].append(token)
    return texts


@pytest.mark.parametrize("bench_name", ["bench", "wide_bench"])
def test_a_row_draws_the_same_tokens_whatever_shares_its_batch(
    bench_name: str, request: pytest.FixtureRequest
) -> None:
    bench: Bench = request.getfixturevalue(bench_name)
    together = run_alone_or_together(bench, [[0, 1, 2, 3, 4, 5, 6]], 12)
    alone = run_alone_or_together(bench, [[slot] for slot in range(7)], 12)
    shuffled = run_alone_or_together(bench, [[6, 2, 0], [5, 1], [4, 3]], 12)
    assert together == alone == shuffled


def test_seeds_children_and_positions_give_different_tokens(wide_bench: Bench) -> None:
    logits = random_logits(1, 8192, 1)[0]
    wide_bench.bind(0, Sampling(8, seed=1))
    wide_bench.bind(1, Sampling(8, seed=2))
    wide_bench.bind(2, Sampling(8, seed=1), child=1)
    runs = [wide_bench.draws(logits, slot, 50).tolist() for slot in range(3)]
    again = wide_bench.draws(logits, 0, 50).tolist()
    assert runs[0] == again
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert sum(x == y for x, y in zip(runs[a], runs[b], strict=True)) < 10
    assert len(set(runs[0])) > 30


def test_rebinding_a_slot_forgets_the_last_request(bench: Bench) -> None:
    logits = random_logits(1, 64, 4)
    bench.bind(
        1, Sampling(8, temperature=0.0, logit_bias=((5, 50.0),), presence_penalty=1.0, min_new_tokens=4)
    )
    assert bench.sample(logits, [1], [1]).tokens.tolist() == [5]
    bench.bind(1, Sampling(8, temperature=0.0))
    assert bench.sample(logits, [1], [1]).tokens.tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("poison", [math.nan, math.inf, "all"])
def test_a_row_of_bad_logits_fails_alone(bench: Bench, poison: float | str) -> None:
    for slot, sampling in enumerate(MIX):
        bench.bind(slot, sampling)
    logits = random_logits(7, 64, 9)
    good = bench.sample(logits, range(7), [5] * 7)
    for bad in range(7):
        for slot, sampling in enumerate(MIX):
            bench.bind(slot, sampling)
        broken = logits.clone()
        if poison == "all":
            broken[bad] = -math.inf
        else:
            broken[bad, 17] = poison
        found = bench.sample(broken, range(7), [5] * 7)
        assert found.valid.tolist() == [row != bad for row in range(7)]
        assert [t for row, t in enumerate(found.tokens.tolist()) if row != bad] == [
            t for row, t in enumerate(good.tokens.tolist()) if row != bad
        ]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperatures_are_greedy_without_overflow(bench: Bench, temperature: float) -> None:
    logits = random_logits(1, 64, 3)[0] * 1000
    bench.bind(0, Sampling(8, temperature=temperature, seed=5))
    assert bench.draws(logits, 0, 20).unique().tolist() == [int(logits.argmax())]


def test_a_grammar_mask_is_the_last_word_before_temperature(bench: Bench) -> None:
    for slot, sampling in enumerate(MIX):
        bench.bind(slot, sampling)

    def only_even(logits: torch.Tensor) -> None:
        logits[:, 1::2] = -math.inf

    logits = random_logits(7, 64, 8)
    kept = logits.clone()
    for position in range(30):
        rows = Rows(tuple(range(7)), (position,) * 7)
        found = bench.sampler.sample(logits, rows, only_even)
        assert bool((found.tokens % 2 == 0).all())
    assert torch.equal(logits, kept), "the model's own logits are what logprobs are computed from"


def test_token_ids_outside_the_vocabulary_are_refused_by_parameter(bench: Bench) -> None:
    with pytest.raises(BadRequest, match="logit_bias names token 64, the vocabulary has 64"):
        bench.bind(0, Sampling(8, logit_bias=((64, 1.0),)))
    with pytest.raises(BadRequest, match="stop_token_ids names token -1"):
        bench.bind(0, Sampling(8, min_new_tokens=1, stop_token_ids=(-1,)))
    with pytest.raises(BadRequest, match="outside the vocabulary"):
        bench.bind(0, Sampling(8, presence_penalty=1.0), prompt=(3, 64))
    with pytest.raises(BadRequest, match="slot 7 is sampled before it is bound"):
        bench.sample(random_logits(1, 64, 1), [7], [1])
