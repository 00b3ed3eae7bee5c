"""Weights that stay as they are stored hold the values of those that don't, in every form the layers take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError, ShapeMismatch
from engine.model.checkpoint import open_checkpoint
from engine.model.config import ModelConfig
from engine.model.draft_weights import dspark_weights
from engine.model.dummy import DummyWeights
from engine.model.expert_layout import stored_matrix
from engine.model.layout import DEEPSEEK_LAYOUT
from engine.model.ops import TorchOps
from engine.model.quantised import Fp4Experts, Fp8Weight, joined, plain, rows_of
from engine.model.share import Share
from engine.model.taker import Taker
from engine.model.tensor_specs import Draft, Storage
from engine.model.weights import head_weights, layer_weights

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def values(weight: Fp8Weight | torch.Tensor) -> torch.Tensor:
    return weight.values(BF16) if isinstance(weight, Fp8Weight) else weight


def same_values(kept: torch.Tensor | Fp8Weight, wide: torch.Tensor | Fp8Weight) -> bool:
    return torch.equal(values(kept).flatten(), values(wide).flatten().to(BF16))


@pytest.mark.parametrize("dummy", [False, True])
def test_a_layer_holds_the_same_values_kept_and_dequantised(dummy: bool, quantised_folder: Path) -> None:
    checkpoint = open_checkpoint(quantised_folder)
    config, share, seen = checkpoint.config, Share(range(2, 6), range(192)), list[int]()
    silent = lambda done, total, name: seen.append(total - done)  # noqa: E731
    with (
        checkpoint.weights(BF16, CPU, share.rule, silent, keeps=True) as kept,
        checkpoint.weights(BF16, CPU, share.rule, lambda *_: None) as wide,
    ):
        made = DummyWeights(config, BF16, CPU, rule=share.rule, layout=DEEPSEEK_LAYOUT)
        sources = (made, made) if dummy else (kept, wide)
        takers = [
            Taker(own, CPU, BF16, keeps=keeps) for own, keeps in zip(sources, (True, False), strict=True)
        ]
        first, second = (layer_weights(config, taker, 3, share) for taker in takers)
        heads = [head_weights(config, taker, share).head for taker in takers]
    assert dummy or len(set(seen)) == len(seen)
    attention, plain_attention = first.attention, second.attention
    for name in ("w_in", "wq_b", "wo_a", "wo_b"):
        assert isinstance(getattr(attention, name), Fp8Weight)
        assert same_values(getattr(attention, name), getattr(plain_attention, name)), name
    assert attention.wo_a.groups == config.o_groups
    assert attention.indexer is not None
    assert plain_attention.indexer is not None
    assert same_values(attention.indexer.wq_b, plain_attention.indexer.wq_b)
    folded = attention.indexer.head_weights.float() * (128**-0.5 * 8**-0.5)
    assert torch.equal(folded, plain_attention.indexer.head_weights)
    assert attention.compressor is not None
    assert plain_attention.compressor is not None
    for own, other in ((attention.compressor.side, plain_attention.compressor.side), tuple(heads)):
        assert (own.dtype, other.dtype) == (BF16, torch.float32)
        assert torch.equal(own.float(), other)
    assert heads[0].shape == (192, config.hidden_size)
    routed = first.moe.routed
    assert isinstance(routed, Fp4Experts)
    assert routed.count == 4
    for codes, scales, floats in (
        (routed.w13, routed.s13, second.moe.floats.w13), (routed.w2, routed.s2, second.moe.floats.w2),
    ):  # fmt: skip
        for expert in range(routed.count):
            assert torch.equal(stored_matrix(codes[expert], scales[expert]).values(BF16), floats[expert])
    assert same_values(first.moe.shared_w13, second.moe.shared_w13)
    assert first.moe.gate.dtype == BF16


def test_a_drafts_injection_is_rows_of_its_stages(dspark_fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(dspark_fields)
    layout = replace(DEEPSEEK_LAYOUT, draft=Draft.DSPARK, stages=3)
    taker = Taker(DummyWeights(config, BF16, CPU, layout=layout), CPU, BF16, keeps=True)
    draft = dspark_weights(config, taker, 3, torch.empty(0))
    assert isinstance(draft.injection.wkv, Fp8Weight)
    assert draft.injection.wkv.shape == (3 * config.head_dim, config.hidden_size)
    last = draft.stages[2].attention.w_in
    assert torch.equal(values(draft.injection.wkv)[1024:], values(last)[config.q_lora_rank :])
    assert isinstance(draft.injection.main_proj, Fp8Weight)


def test_dummies_in_fp8_and_fp4_have_the_variance_of_those_in_floats(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(fields)
    made = DummyWeights(config, BF16, CPU, layout=DEEPSEEK_LAYOUT)
    again = DummyWeights(config, BF16, CPU, layout=DEEPSEEK_LAYOUT)
    for name in (
        "layers.2.attn.wq_b.weight",
        "layers.2.attn.wo_b.weight",
        "layers.2.ffn.experts.3.w2.weight",
    ):
        weight = made[name]
        assert not isinstance(weight, torch.Tensor)
        full = weight.values(torch.float32)
        assert float(full.std()) == pytest.approx(full.shape[1] ** -0.5, rel=0.1)
        assert len(weight.scales.unique()) == 2
        other = again[name]
        assert not isinstance(other, torch.Tensor)
        assert torch.equal(weight.codes, other.codes)
    assert not torch.equal(full, made["layers.2.ffn.experts.4.w2.weight"].values(torch.float32))


def test_joining_and_cutting_keep_to_squares() -> None:
    codes = torch.zeros(256, 128, dtype=torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.zeros(2, 1, dtype=torch.uint8))
    ragged = Fp8Weight(codes[:130], torch.zeros(2, 1, dtype=torch.uint8))
    assert joined([weight, ragged]).shape == (386, 128)
    assert rows_of(weight, 128, 256).shape == (128, 128)
    for parts in ([ragged, weight], [weight, torch.zeros(1, 128)]):
        with pytest.raises(ShapeMismatch):
            joined(parts)
    with pytest.raises(ShapeMismatch, match="64"):
        rows_of(weight, 64, 128)


def test_operations_without_kernels_refuse_quantised_weights() -> None:
    weight = Fp8Weight(torch.zeros(1, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ShapeMismatch, match="Fp8Weight"):
        TorchOps().linear(torch.zeros(1, 128), weight)
    with pytest.raises(ShapeMismatch):
        plain(weight)


def test_experts_of_two_kinds_are_refused(fields: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(fields)
    of_layer = DummyWeights(config, BF16, CPU, layout=DEEPSEEK_LAYOUT)
    made = {name: of_layer[name] for name in of_layer if name.startswith("layers.1.")}
    floats = DummyWeights(config, BF16, CPU, layout=replace(DEEPSEEK_LAYOUT, experts=Storage.FLOAT))
    name = "layers.1.ffn.experts.5.w3.weight"
    made[name] = floats[name]
    with pytest.raises(CheckpointError, match=name):
        layer_weights(config, Taker(made, CPU, BF16, keeps=True), 1, Share(range(8), range(384)))
