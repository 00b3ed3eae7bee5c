"""Writes a checkpoint in DeepSeek's own layout: FP8 dense and FP4 expert matrices, shards and their index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.layout import DEEPSEEK_LAYOUT, FLOAT_LAYOUT, expected_tensors, sniff_layout
from engine.model.quant import quantise_fp4_groups, quantise_fp8_blocks
from engine.model.sources import INDEX_NAME
from engine.model.tensor_specs import Layout, Role, TensorSpec, scale_name

QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I64": 8, "I32": 4}


def write_checkpoint(
    folder: Path,
    fields: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    quantised: bool,
    max_shard_bytes: int = 15 << 20,
) -> None:
    """Writes config.json, shards and index into `folder`, made if need be; replaces what was there.

    fields           content of config.json; quantization_config and expert_dtype are set to what is written
    weights          floating-point matrices and integer tables by DeepSeek's names, `mtp.*` if wanted
    quantised        True: FP8 dense, FP4 experts, bf16 embeddings and norms; False: every tensor as float32
    max_shard_bytes  tensor bytes of one shard; a larger single tensor gets a shard of its own
    raises           ConfigError; CheckpointError where weights are missing, extra or misshapen
    """
    config = ModelConfig.from_dict(fields)
    layout = export_layout(config, weights, quantised=quantised)
    specs = expected_tensors(config, layout)
    _check(specs, weights)
    shards = _plan_shards(specs, quantised, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*-of-*.safetensors"):
        old.unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        stored: dict[str, Tensor] = {}
        for name in names:
            stored |= _stored(name, specs[name], weights[name], quantised)
        save_file(stored, folder / file)
        weight_map |= dict.fromkeys(stored, file)
    _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))})
    own = {key: value for key, value in fields.items() if key not in ("quantization_config", "expert_dtype")}
    if quantised:
        own |= {"quantization_config": QUANTIZATION_CONFIG, "expert_dtype": "fp4"}
    _write_json(folder / "config.json", own)


def export_layout(config: ModelConfig, weights: Mapping[str, Tensor], *, quantised: bool) -> Layout:
    """The layout that is written; draft stages are those that the weights hold. raises CheckpointError."""
    drafts = sniff_layout(config, dict.fromkeys(weights, "F32"))
    base = DEEPSEEK_LAYOUT if quantised else FLOAT_LAYOUT
    return replace(base, draft=drafts.draft, stages=drafts.stages)


def _check(specs: Mapping[str, TensorSpec], weights: Mapping[str, Tensor]) -> None:
    wanted = {name: spec.logical_shape for name, spec in specs.items() if spec.role is not Role.SCALE}
    for name, shape in wanted.items():
        if name not in weights:
            raise CheckpointError(f"{name} is missing (expected shape {list(shape)})")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(f"{name} has shape {list(weights[name].shape)}, expected {list(shape)}")
    if extra := sorted(weights.keys() - wanted.keys()):
        raise CheckpointError(f"{extra[0]} is extra ({len(extra)} in all)")


def _plan_shards(specs: Mapping[str, TensorSpec], quantised: bool, max_shard_bytes: int) -> list[list[str]]:
    """Weight names by shard, in layout order; scales go with their weight."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, spec in specs.items():
        if spec.role is Role.SCALE:
            continue
        size = _stored_bytes(name, spec, quantised)
        if spec.role in (Role.FP8, Role.FP4):
            size += _stored_bytes(scale_name(name), specs[scale_name(name)], quantised)
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _stored_bytes(name: str, spec: TensorSpec, quantised: bool) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count * _BYTES[_stored_dtype(name, spec, quantised)]


def _stored_dtype(name: str, spec: TensorSpec, quantised: bool) -> str:
    if spec.role in (Role.MATRIX, Role.FP32):
        is_bf16 = quantised and (spec.role is Role.MATRIX or name.endswith("norm.weight"))
        return "BF16" if is_bf16 else "F32"
    return spec.dtypes[0]


def _stored(name: str, spec: TensorSpec, weight: Tensor, quantised: bool) -> dict[str, Tensor]:
    """The stored tensors of one weight: itself, and its scales where it is quantised."""
    weight = weight.detach().cpu()
    if spec.role is Role.TABLE:
        return {name: weight.to(torch.int64).contiguous()}
    if spec.role in (Role.FP8, Role.FP4):
        quantise = quantise_fp8_blocks if spec.role is Role.FP8 else quantise_fp4_groups
        codes, scale = quantise(weight)
        return {name: codes.contiguous(), scale_name(name): scale}
    dtype = torch.bfloat16 if _stored_dtype(name, spec, quantised) == "BF16" else torch.float32
    # A copy: two names may share memory, which safetensors refuses.
    return {name: weight.to(dtype, copy=True).contiguous()}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
