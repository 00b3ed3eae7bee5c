"""Checkpoints in DeepSeek's exact types round-trip; drafts, plain floats and transformers' names load too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model.checkpoint import load_checkpoint, open_checkpoint
from engine.model.config import ModelConfig
from engine.model.export import write_checkpoint
from engine.model.layout import DEEPSEEK_LAYOUT, expected_tensors
from engine.model.quant import (
    dequantise_fp4_groups,
    dequantise_fp8_blocks,
    quantise_fp4_groups,
    quantise_fp8_blocks,
)
from engine.model.shards import Shard
from engine.model.tensor_specs import Draft, Role, TensorSpec

CPU = torch.device("cpu")


def silent(done: int, total: int, name: str) -> None:
    """Progress that nobody watches."""


def as_stored(name: str, role: Role, weight: Tensor) -> Tensor:
    """A weight as it is after the trip through DeepSeek's types."""
    if role is Role.FP8:
        return dequantise_fp8_blocks(*quantise_fp8_blocks(weight), torch.float32)
    if role is Role.FP4:
        return dequantise_fp4_groups(*quantise_fp4_groups(weight), torch.float32)
    if role is Role.MATRIX or name.endswith("norm.weight"):
        return weight.bfloat16().float()
    return weight


def test_files_hold_the_release_types_and_shards_stay_small(
    quantised_folder: Path, fields: dict[str, Any]
) -> None:
    stored: dict[str, Tensor] = {}
    files = sorted(quantised_folder.glob("*.safetensors"))
    assert len(files) > 3
    for file in files:
        assert file.stat().st_size < (1 << 20) + (1 << 16)
        stored |= load_file(file)
    types = {
        "layers.0.attn.wq_a.weight": torch.float8_e4m3fn,
        "layers.0.attn.wq_a.scale": torch.float8_e8m0fnu,
        "layers.1.ffn.experts.3.w2.weight": torch.int8,
        "layers.1.ffn.experts.3.w2.scale": torch.float8_e8m0fnu,
        "layers.1.ffn.shared_experts.w1.weight": torch.float8_e4m3fn,
        "layers.0.ffn.gate.tid2eid": torch.int64,
        "layers.1.ffn.gate.bias": torch.float32,
        "layers.1.attn.compressor.wkv.weight": torch.bfloat16,
        "layers.1.attn.compressor.ape": torch.float32,
        "layers.2.attn_norm.weight": torch.bfloat16,
        "layers.2.hc_attn_fn": torch.float32,
        "embed.weight": torch.bfloat16,
    }
    assert {name: stored[name].dtype for name in types} == types
    assert stored.keys() == expected_tensors(ModelConfig.from_dict(fields), DEEPSEEK_LAYOUT).keys()
    assert json.loads((quantised_folder / "config.json").read_text())["expert_dtype"] == "fp4"


def test_every_weight_comes_back_as_its_own_rounding(
    quantised_folder: Path, fields: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    config, loaded = load_checkpoint(quantised_folder, torch.float32, CPU, progress=silent)
    specs = expected_tensors(config, DEEPSEEK_LAYOUT)
    assert loaded.keys() == weights.keys()
    for name, tensor in loaded.items():
        if specs[name].role is Role.TABLE:
            assert tensor.dtype == torch.int32
            assert torch.equal(tensor, weights[name])
        else:
            assert torch.equal(tensor, as_stored(name, specs[name].role, weights[name])), name


def test_matrices_take_the_wanted_type_and_the_rest_stays_float32(quantised_folder: Path) -> None:
    config, loaded = load_checkpoint(quantised_folder, torch.bfloat16, CPU, progress=silent)
    specs = expected_tensors(config, DEEPSEEK_LAYOUT)
    for name, tensor in loaded.items():
        expected = {Role.FP32: torch.float32, Role.TABLE: torch.int32}.get(specs[name].role, torch.bfloat16)
        assert tensor.dtype == expected, name


def test_float_checkpoints_come_back_bit_for_bit(
    tmp_path: Path, fields: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, fields, weights, quantised=False)
    _, loaded = load_checkpoint(tmp_path, torch.float32, CPU, progress=silent)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_a_second_export_leaves_nothing_of_the_first(
    tmp_path: Path, fields: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    write_checkpoint(tmp_path, fields, weights, quantised=True, max_shard_bytes=1 << 20)
    write_checkpoint(tmp_path, fields, weights, quantised=True, max_shard_bytes=1 << 30)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize(("draft", "stages"), [(Draft.CLASSIC, 1), (Draft.DSPARK, 3)])
def test_draft_stages_are_recognised_by_content_and_loaded_on_demand(
    tmp_path: Path,
    fields: dict[str, Any],
    dspark_fields: dict[str, Any],
    weights: dict[str, Tensor],
    draft_weights: Callable[[dict[str, Any], Draft, int], dict[str, Tensor]],
    draft: Draft,
    stages: int,
) -> None:
    own = dspark_fields if draft is Draft.DSPARK else fields
    write_checkpoint(tmp_path, own, weights | draft_weights(own, draft, stages), quantised=True)
    with_draft = open_checkpoint(tmp_path, draft=True)
    assert (with_draft.layout.draft, with_draft.layout.stages) == (draft, stages)
    names = {name for name, _ in with_draft.tensors(torch.float32, CPU, progress=silent)}
    _, without = load_checkpoint(tmp_path, torch.float32, CPU, progress=silent)
    assert without.keys() == weights.keys()
    assert {name for name in names if not name.startswith("mtp.")} == without.keys()
    assert any(name.startswith(f"mtp.{stages - 1}.ffn.experts.7.") for name in names)


def test_shards_of_a_rule_tile_every_weight(quantised_folder: Path) -> None:
    _, whole = load_checkpoint(quantised_folder, torch.float32, CPU, progress=silent)

    def halves(part: int, dim: int) -> dict[str, Tensor]:
        def rule(name: str, spec: TensorSpec) -> Shard | None:
            if name.endswith(("wq_b.weight", "w1.weight", "w2.weight")):
                half = spec.logical_shape[dim] // 2
                cut = half // 128 * 128 if half >= 128 else 0
                return Shard(dim, 0, cut) if part == 0 else Shard(dim, cut, spec.logical_shape[dim])
            return None

        return load_checkpoint(quantised_folder, torch.float32, CPU, rule=rule, progress=silent)[1]

    for dim in (0, 1):
        first, second = halves(0, dim), halves(1, dim)
        assert first.keys() == second.keys() < whole.keys()
        for name in first:
            assert torch.equal(torch.cat((first[name], second[name]), dim), whole[name]), name


def test_progress_names_every_weight_once(quantised_folder: Path, weights: dict[str, Tensor]) -> None:
    seen: list[tuple[int, int, str]] = []
    load_checkpoint(quantised_folder, torch.float32, CPU, progress=lambda *step: seen.append(step))
    assert [step[0] for step in seen] == list(range(1, len(weights) + 1))
    assert {step[2] for step in seen} == weights.keys()
