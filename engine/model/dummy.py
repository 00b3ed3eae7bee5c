"""Weights of any geometry without a checkpoint: valid, bounded, the same for equal seeds, not trained.

Each is made on its device when it is asked for, in the form in which a checkpoint of the layout stores it, so
that a model too large to be there twice is filled in seconds.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.layout import FLOAT_LAYOUT, expected_tensors
from engine.model.quant import FP4_GROUP, FP8_BLOCK, power_of_two
from engine.model.quantised import Fp4Weight, Fp8Weight, Stored, plain
from engine.model.shards import RankWeights, Shard, ShardRule, whole
from engine.model.tensor_specs import Layout, Role, TensorSpec

BIAS_DEVIATION = 0.05
"""Of a router's biases, beside scores of deviation 0.28: of 256 experts the busiest then gets 2.5 times the
mean, the idlest a fourth of it. With larger biases the same few experts would take everything."""
E2M1_DEVIATION = math.sqrt(68.5 / 8)
"""Of uniformly random FP4 codes."""


class DummyWeights(RankWeights):
    """Weights by DeepSeek's names, as the loader gives them to a rank of this rule; made on access.

    Matrices have variance 1 / inputs, norms lie around 1, other parameters around 0. Each tensor depends on
    its name and the seed only. Hash tables are balanced, and no token has an expert twice.

    layout  floats, or FP8 and FP4; names the draft stages that are wanted beside the backbone
    raises  ShapeMismatch for matrices in FP8 whose width isn't a multiple of 128
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0,
        rule: ShardRule = whole, layout: Layout = FLOAT_LAYOUT,
    ) -> None:  # fmt: skip
        super().__init__(expected_tensors(config, layout), rule)
        self._config, self._dtype, self._device, self._seed = config, dtype, device, seed

    def __getitem__(self, name: str) -> Stored:
        spec, shard = self._specs[name], self._shards[name]
        seed = zlib.crc32(f"{self._seed} {name}".encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        if spec.role is Role.TABLE:
            return _part(_balanced_table(spec.shape, self._config.n_routed_experts, generator), shard)
        if spec.role in (Role.FP8, Role.FP4):
            if shard != whole(name, spec):
                raise CheckpointError(f"{name}: only whole quantised matrices are made, not {shard}")
            rows, columns = spec.logical_shape
            make = _fp8 if spec.role is Role.FP8 else _fp4
            return make(rows, columns, generator)
        made = _values(name, spec, generator).to(torch.float32 if spec.role is Role.FP32 else self._dtype)
        return _part(made, shard)


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    rule: ShardRule = whole,
    layout: Layout = FLOAT_LAYOUT,
) -> dict[str, Tensor]:
    """All of DummyWeights at once, of a layout of floats."""
    made = DummyWeights(config, dtype, device, seed, rule, layout)
    return {name: plain(weight) for name, weight in made.items()}


def _part(made: Tensor, shard: Shard) -> Tensor:
    part = made.narrow(shard.dim, shard.start, shard.stop - shard.start)
    # A view would hold the memory of the whole.
    return part if part.shape == made.shape else part.clone()


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    drawn: Tensor = torch.randn(shape, generator=generator, device=generator.device)
    return drawn.clamp_(-4, 4)


def _values(name: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    noise = _noise(spec.shape, generator)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("gate.bias"):
        return BIAS_DEVIATION * noise
    if len(spec.shape) == 1:
        return 0.5 * noise
    return noise * float(spec.shape[-1] ** -0.5)


def _fp8(rows: int, columns: int, generator: torch.Generator) -> Fp8Weight:
    """Variance 1 / columns; of two scales each square has one by chance, so that wrong scales show."""
    exponent = round(math.log2(columns**-0.5 / 64))
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    more = torch.randint(0, 2, blocks, generator=generator, device=generator.device)
    codes = _noise((rows, columns), generator) * (columns**-0.5 * 2.0**-exponent)
    spread = power_of_two(-more).repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    codes *= spread[:rows, :columns]
    return Fp8Weight(codes.to(torch.float8_e4m3fn), (more + exponent + 127).to(torch.uint8))


def _fp4(rows: int, columns: int, generator: torch.Generator) -> Fp4Weight:
    """Any codes; variance 1 / columns by scales of two sizes, the larger one as often as it takes."""
    wanted = math.log2(columns**-0.5 / E2M1_DEVIATION)
    exponent = math.floor(wanted)
    often = (4 ** (wanted - exponent) - 1) / 3
    device, shape = generator.device, (rows, columns // FP4_GROUP)
    words = torch.randint(
        -(2**31), 2**31, (rows, columns // 8), generator=generator, device=device, dtype=torch.int32
    )
    larger = torch.rand(shape, generator=generator, device=device) < often
    return Fp4Weight(words.view(torch.uint8), (larger + (exponent + 127)).to(torch.uint8))


def _balanced_table(shape: tuple[int, ...], experts: int, generator: torch.Generator) -> Tensor:
    """int32 [V, k]: rows of k consecutive experts, in random order; each expert is used equally often."""
    vocab_size, k = shape
    start = torch.randperm(vocab_size, generator=generator, device=generator.device) * k
    return ((start[:, None] + torch.arange(k, device=generator.device)) % experts).to(torch.int32)
