"""Weights without a checkpoint are valid, bounded and repeatable at any geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.dummy import DummyWeights, dummy_weights
from engine.model.layout import FLOAT_LAYOUT, expected_tensors
from engine.model.quantised import plain
from engine.model.tensor_specs import Role

CPU = torch.device("cpu")


@pytest.mark.parametrize("change", [{}, {"n_routed_experts": 7, "num_experts_per_tok": 3, "vocab_size": 350}])
def test_dummy_weights_have_every_tensor_in_the_loaders_types_and_bounds(
    fields: dict[str, Any], change: dict[str, int]
) -> None:
    config = ModelConfig.from_dict(fields | change)
    weights = dummy_weights(config, torch.bfloat16, CPU)
    specs = expected_tensors(config, FLOAT_LAYOUT)
    assert weights.keys() == specs.keys()
    types = {Role.FP32: torch.float32, Role.TABLE: torch.int32, Role.MATRIX: torch.bfloat16}
    for name, tensor in weights.items():
        assert (tuple(tensor.shape), tensor.dtype) == (specs[name].shape, types[specs[name].role]), name
        if specs[name].role is not Role.TABLE:
            assert float(tensor.abs().max()) <= 4


def test_hash_tables_are_balanced_and_give_no_token_an_expert_twice(weights: dict[str, Tensor]) -> None:
    table = weights["layers.0.ffn.gate.tid2eid"]
    ranked = table.sort(dim=1).values
    assert bool((ranked[:, 1:] != ranked[:, :-1]).all())
    uses = torch.bincount(table.flatten(), minlength=8)
    assert int(uses.max() - uses.min()) <= 1


def test_equal_seeds_give_equal_weights_and_others_differ(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(fields | {"num_hidden_layers": 1, "compress_ratios": [0]})
    first, again, other = (dummy_weights(config, torch.float32, CPU, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert not torch.equal(first["layers.0.ffn.gate.tid2eid"], other["layers.0.ffn.gate.tid2eid"])


def test_routers_spread_their_rows_with_a_trained_ones_skew(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(fields | {"n_routed_experts": 256, "num_experts_per_tok": 6})
    made = DummyWeights(config, torch.float32, CPU)
    gate, bias = (plain(made[f"layers.2.ffn.gate.{name}"]) for name in ("weight", "bias"))
    rows = torch.randn(4096, config.hidden_size, generator=torch.Generator().manual_seed(0))
    scores = torch.nn.functional.softplus(rows @ gate.t()).sqrt()
    uses = torch.bincount((scores + bias).topk(6).indices.flatten(), minlength=256) / (4096 * 6 / 256)
    assert 1.5 < float(uses.max()) < 4
    assert 0.1 < float(uses.min()) < 0.7
