"""Logits of every path equal transformers' full forward within 1e-5, float32, sparse selection on."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.cpu import CpuOps
from engine.model.invariant import TileOps
from engine.model.ops import TorchOps
from tests.golden.driver import Driver, build
from tests.golden.tiny import random_tokens, reference_logits, reference_model, tiny_config, weights_of

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def tokens():
    """600 tokens: 150 c4 entries against a selection of 16, so both forms of selected attention run."""
    return random_tokens(600, 1)


@pytest.fixture(scope="module")
def expected(reference, tokens):
    """The reference's logits of every position."""
    return reference_logits(reference, tokens)


def worst(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference."""
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("ops", [TorchOps, TileOps, CpuOps])
def test_one_forward_equals_the_reference(config, weights, tokens, expected, ops):
    driver = Driver(build(config, weights, deterministic=ops.row_invariant, ops=ops()))
    assert worst(driver.full(tokens, [len(tokens)]), expected) < TOLERANCE


@pytest.mark.parametrize(
    "chunks", [[7], [33], [70, 71, 129, 30, 300], [255, 1, 1, 343], [127, 2, 126, 3, 129]]
)
def test_odd_chunks_equal_the_reference(config, weights, tokens, expected, chunks):
    driver = Driver(build(config, weights))
    assert worst(driver.full(tokens, chunks), expected) < TOLERANCE


@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 121, 250])
def test_decoding_from_every_phase_equals_the_reference(config, weights, tokens, expected, prefill):
    """Single tokens across several c4 windows, and across a c128 and a page boundary for the late starts."""
    driver = Driver(build(config, weights))
    got = driver.full(tokens[: prefill + 12], [prefill, 1])
    assert worst(got, expected[: prefill + 12]) < TOLERANCE


def test_wide_heads_equal_the_reference():
    """Head width 80: no power of two anywhere in a latent, 64 channels without rotation."""
    changes = {"head_dim": 80, "num_hash_layers": 1, "compress_ratios": [128, 4, 0, 4, 128, 4]}
    reference = reference_model(3, **changes)
    tokens = random_tokens(300, 2)
    driver = Driver(build(tiny_config(**changes), weights_of(reference)))
    assert worst(driver.full(tokens, [100, 1, 1, 1, 61]), reference_logits(reference, tokens)) < TOLERANCE


def test_greedy_generation_is_token_identical_for_300_tokens(reference, config, weights):
    """The reference generates with its own cache; the engine on the kernels that serve."""
    prompt = random_tokens(40, 5)
    with torch.no_grad():
        wanted = reference.generate(
            torch.tensor([prompt]), max_new_tokens=300, do_sample=False, eos_token_id=None, pad_token_id=2
        )[0, len(prompt) :].tolist()
    driver = Driver(build(config, weights, ops=CpuOps()))
    driver.bind(1)
    got = [int(driver.run([(1, prompt)])[0][-1].argmax())]
    while len(got) < len(wanted):
        got.append(int(driver.run([(1, got[-1:])])[0][-1].argmax()))
    assert got == wanted
