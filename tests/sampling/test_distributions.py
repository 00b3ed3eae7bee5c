"""Drawn tokens follow the exact distribution that the parameters define."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from engine.messages import Sampling
from engine.runner.randomness import Purpose, random_bits, request_keys, uniforms
from tests.sampling.naive import distribution, processed

if TYPE_CHECKING:
    from tests.sampling.conftest import Bench

DRAWS = 20_000


def chi_square(counts: torch.Tensor, expected: list[float]) -> tuple[float, int]:
    """Statistic and degrees of freedom; cells of fewer than five expected draws are pooled."""
    total = int(counts.sum())
    cells: list[tuple[float, float]] = []
    pooled = [0.0, 0.0]
    for count, probability in zip(counts.tolist(), expected, strict=True):
        if probability * total >= 5:
            cells.append((count, probability * total))
        else:
            pooled[0] += count
            pooled[1] += probability * total
    if pooled[1] > 0:
        cells.append((pooled[0], pooled[1]))
    return sum((seen - want) ** 2 / want for seen, want in cells), len(cells) - 1


def bound(degrees: int) -> float:
    """Chi-square quantile at about 1 - 1e-5, by Wilson and Hilferty's approximation."""
    if degrees == 0:
        return 1e-9
    return degrees * (1 - 2 / (9 * degrees) + 4.27 * math.sqrt(2 / (9 * degrees))) ** 3


CASES = {
    "plain": Sampling(8, seed=11),
    "hot": Sampling(8, temperature=1.7, seed=12),
    "cold": Sampling(8, temperature=0.3, seed=13),
    "top_k": Sampling(8, top_k=7, seed=14),
    "top_p": Sampling(8, top_p=0.8, seed=15),
    "min_p": Sampling(8, min_p=0.1, seed=16),
    "all": Sampling(8, temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, seed=17),
    "bias": Sampling(8, logit_bias=((3, 2.5), (60, -100.0)), seed=18),
    "min_new": Sampling(8, min_new_tokens=100_000, stop_token_ids=(5,), seed=19),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_exact_distribution(bench: Bench, name: str) -> None:
    sampling = CASES[name]
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 1.5
    bench.bind(2, sampling)
    expected = distribution(processed(logits.tolist(), sampling, (), (), (1,)), sampling)
    counts = torch.bincount(bench.draws(logits, 2, DRAWS), minlength=64)
    assert all(p > 0 for count, p in zip(counts.tolist(), expected, strict=True) if count), "impossible token"
    statistic, degrees = chi_square(counts, expected)
    assert statistic < bound(degrees)


def test_a_near_uniform_row_still_finds_its_nucleus(wide_bench: Bench) -> None:
    """The nucleus is longer than the sorted prefix, so the whole row has to be sorted."""
    logits = torch.randn(8192, generator=torch.Generator().manual_seed(2)) * 0.1
    sampling = Sampling(8, top_p=0.7, seed=3)
    wide_bench.bind(1, sampling)
    expected = distribution(logits.tolist(), sampling)
    kept = sum(p > 0 for p in expected)
    assert kept > 4096
    drawn = wide_bench.draws(logits, 1, 400)
    assert all(expected[token] > 0 for token in drawn.tolist())


def test_uniforms_are_uniform_and_inside_the_open_interval() -> None:
    n = 200_000
    one = torch.ones(n, dtype=torch.int64)
    for seeds, children, positions in (
        (torch.arange(n), one, one),
        (one, torch.arange(n), one),
        (one * -5, one, torch.arange(n)),
    ):
        u = uniforms(request_keys(seeds, children), positions, Purpose.SAMPLE)
        assert float(u.min()) > 0
        assert float(u.max()) < 1
        statistic, degrees = chi_square(torch.histc(u, 100, 0, 1), [0.01] * 100)
        assert statistic < bound(degrees)
        # Successive counters are independent: the correlation of n pairs is about n^-0.5.
        assert abs(float(torch.corrcoef(torch.stack((u[1:], u[:-1])))[0, 1])) < 5 * n**-0.5


def test_every_word_of_the_key_changes_half_of_the_bits() -> None:
    base = torch.tensor([123]), torch.tensor([4]), torch.tensor([567])
    reference = int(random_bits(request_keys(*base[:2]), base[2], Purpose.SAMPLE))
    variants = [random_bits(request_keys(*base[:2]), base[2], Purpose.DRAFT)]
    for word in range(3):
        for bit in range(64):
            changed = list(base)
            changed[word] = changed[word] ^ (torch.tensor([1]) << bit)
            keys = request_keys(changed[0], changed[1])
            variants.append(random_bits(keys, changed[2], Purpose.SAMPLE))
    flips = [((int(v) ^ reference) & (2**64 - 1)).bit_count() for v in variants]
    assert min(flips) > 10
    assert abs(sum(flips) / len(flips) - 32) < 1
