"""The mode with simulated KV rounding equals a second, independent model that rounds the same values."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.model.model import DeepseekV4
from tests.golden.dense import Dense
from tests.golden.driver import Driver
from tests.golden.tiny import (
    deepseek_fields,
    random_tokens,
    reference_logits,
    reference_model,
    tiny_config,
    weights_of,
)

# Wide enough that 64 channels carry no rotation: one rounding group.
CHANGES = {"head_dim": 80}


@pytest.fixture(scope="module")
def wide():
    """transformers' model with wide heads."""
    return reference_model(7, **CHANGES)


def test_the_second_model_without_rounding_equals_transformers(wide):
    tokens = random_tokens(200, 3)
    dense = Dense(deepseek_fields(**CHANGES), weights_of(wide), rounding=False)
    with torch.no_grad():
        assert (dense.logits(tokens) - reference_logits(wide, tokens)).abs().max() < 1e-5


def rounding_model(config, weights) -> DeepseekV4:
    """A CPU model that simulates rounding."""
    return DeepseekV4(
        config, weights, device="cpu", dtype=torch.float32, deterministic=False, kv_rounding="simulated"
    )


def test_rounded_logits_equal_the_second_model(wide):
    """Sparse selection on, in chunks and single tokens.

    A value on a rounding edge, within float32 noise, may fall to either side, which depends on the processor,
    and later rows attend to it. So most rows are equal before the first such value, and a row's difference is
    small beside what rounding does to it.
    """
    weights = weights_of(wide)
    driver = Driver(rounding_model(tiny_config(**CHANGES), weights))
    differences, effects = [], []
    for seed in range(3, 7):
        tokens = random_tokens(200, seed)
        with torch.no_grad():
            expected = Dense(deepseek_fields(**CHANGES), weights, rounding=True).logits(tokens)
        differences.append((driver.full(tokens, [90, 1, 1, 1, 1, 1, 40]) - expected).abs().amax(1))
        effects.append((reference_logits(wide, tokens) - expected).abs().amax(1))
    difference, effect = torch.cat(differences), torch.cat(effects)
    assert (difference < 2e-5).float().mean() >= 0.25
    assert (difference / effect).median() < 0.01
    assert effect.max() > 0.01


def test_a_width_that_no_group_divides_is_refused(config, weights):
    with pytest.raises(ConfigError, match="48 channels"):
        rounding_model(config, weights)
