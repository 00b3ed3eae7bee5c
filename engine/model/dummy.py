"""Weights of any geometry without a checkpoint: valid, bounded, the same for equal seeds, not trained."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from engine.model.checkpoint import ShardRule, whole
from engine.model.config import ModelConfig
from engine.model.layout import FLOAT_LAYOUT, expected_tensors
from engine.model.tensor_specs import Layout, Role, TensorSpec


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    rule: ShardRule = whole,
    layout: Layout = FLOAT_LAYOUT,
) -> dict[str, Tensor]:
    """Weights by DeepSeek's names, as the loader gives them to a rank of this rule.

    Matrices have variance 1 / inputs, norms lie around 1, other parameters around 0. Each tensor depends on
    its name and the seed only. Hash tables are balanced, and no token has an expert twice.

    layout  of floats; names the draft stages that are wanted beside the backbone
    """
    weights: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config, layout).items():
        shard = rule(name, spec)
        if shard is None:
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if spec.role is Role.TABLE:
            made = _balanced_table(spec.shape, config.n_routed_experts, generator)
        else:
            made = _values(name, spec, generator).to(torch.float32 if spec.role is Role.FP32 else dtype)
        weights[name] = made.narrow(shard.dim, shard.start, shard.stop - shard.start)
    return weights


def _values(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(spec.shape, generator=generator, device=generator.device).clamp_(-4, 4)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if len(spec.shape) == 1:
        return 0.5 * noise
    return noise * float(spec.shape[-1] ** -0.5)


def _balanced_table(shape: tuple[int, ...], experts: int, generator: torch.Generator) -> Tensor:
    """int32 [V, k]: rows of k consecutive experts, in random order; each expert is used equally often."""
    vocab_size, k = shape
    start = torch.randperm(vocab_size, generator=generator, device=generator.device) * k
    return ((start[:, None] + torch.arange(k, device=generator.device)) % experts).to(torch.int32)
