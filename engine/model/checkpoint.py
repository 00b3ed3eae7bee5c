"""Loads a checkpoint: everything is verified from the headers first, then tensors are read one at a time,
dequantised on the target device, under DeepSeek's names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.layout import expected_tensors, sniff_layout
from engine.model.quant import FP4_GROUP, FP8_BLOCK, dequantise_fp4_groups, dequantise_fp8_blocks
from engine.model.sources import Source, find_sources
from engine.model.tensor_specs import Layout, Role, TensorSpec, scale_name

log = logging.getLogger(__name__)

_SHOWN_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a tensor that a rank keeps: `start` to `stop` (exclusive) of unpacked dimension `dim`."""

    dim: int
    start: int
    stop: int


ShardRule = Callable[[str, TensorSpec], Shard | None]
"""Which part of a tensor this rank keeps; None where it keeps nothing of it. Scales follow their weight."""

Progress = Callable[[int, int, str], None]
"""Called after each tensor with tensors done, tensors in all, and its name."""


def whole(name: str, spec: TensorSpec) -> Shard | None:
    """The rule of a single rank: keep everything."""
    return Shard(0, 0, spec.logical_shape[0])


def log_progress(done: int, total: int, name: str) -> None:
    """Progress as log lines, one a tenth."""
    if done == total or done * 10 // total != (done - 1) * 10 // total:
        log.info("loaded %d of %d tensors, last %s", done, total, name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: nothing but names, places and types yet."""

    folder: Path
    config: ModelConfig
    layout: Layout
    specs: Mapping[str, TensorSpec]
    sources: Mapping[str, Source]

    def tensors(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rule: ShardRule = whole,
        progress: Progress = log_progress,
    ) -> Iterator[tuple[str, Tensor]]:
        """Every weight of this rank, in file order; scales are consumed with their weights.

        dtype   of matrices; norms, mixing parameters, sinks and biases are float32, tables int32
        raises  CheckpointError naming the tensor whose content is wrong
        """
        names = [name for name, spec in self.specs.items() if spec.role is not Role.SCALE]
        names.sort(key=lambda name: self.sources[name].file)
        with ExitStack() as stack:
            files = _Files(stack)
            for done, name in enumerate(names, 1):
                shard = rule(name, self.specs[name])
                if shard is not None:
                    yield name, self._load(name, shard, files, dtype, device)
                progress(done, len(names), name)

    def _load(
        self, name: str, shard: Shard, files: _Files, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        role = self.specs[name].role
        stored, scale_shard = stored_shards(name, role, shard)
        raw = files.read(self.sources[name], stored).to(device)
        try:
            if role in (Role.FP8, Role.FP4):
                scale = files.read(self.sources[scale_name(name)], scale_shard).to(device)
                dequantise = dequantise_fp8_blocks if role is Role.FP8 else dequantise_fp4_groups
                return dequantise(raw, scale, dtype)
            if role is Role.TABLE:
                return self._table(raw)
            return _floats(raw, torch.float32 if role is Role.FP32 else dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error

    def _table(self, raw: Tensor) -> Tensor:
        low, high = int(raw.min()), int(raw.max())
        if low < 0 or high >= self.config.n_routed_experts:
            raise CheckpointError(f"holds experts {low} to {high} of {self.config.n_routed_experts}")
        return raw.to(torch.int32)


def open_checkpoint(folder: str | Path, *, draft: bool = False) -> Checkpoint:
    """Reads config.json and all headers, and verifies names, shapes and types.

    draft   whether `mtp.*` tensors belong to what is verified and loaded
    raises  ConfigError for config.json; CheckpointError naming each tensor that is missing, extra, misshapen
            or of a wrong type, with what was expected and what was found
    """
    folder = Path(folder)
    config = ModelConfig.from_json(folder)
    sources = find_sources(folder)
    if not draft:
        sources = {name: source for name, source in sources.items() if not name.startswith("mtp.")}
    layout = sniff_layout(config, {name: source.dtype for name, source in sources.items()})
    specs = expected_tensors(config, layout)
    problems = _problems(specs, sources)
    if problems:
        more = len(problems) - _SHOWN_PROBLEMS
        tail = [f"and {more} more"] if more > 0 else []
        raise CheckpointError(f"{folder}: " + "; ".join(problems[:_SHOWN_PROBLEMS] + tail))
    return Checkpoint(folder, config, layout, specs, sources)


def load_checkpoint(
    folder: str | Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    draft: bool = False,
    rule: ShardRule = whole,
    progress: Progress = log_progress,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and weights by DeepSeek's names; arguments and errors as of the two steps above."""
    checkpoint = open_checkpoint(folder, draft=draft)
    return checkpoint.config, dict(checkpoint.tensors(dtype, device, rule, progress))


def stored_shards(name: str, role: Role, shard: Shard) -> tuple[Shard, Shard]:
    """The parts of payload and scales that hold a logical part.

    raises  CheckpointError where the cut falls inside a scale's block
    """
    unit = {Role.FP8: FP8_BLOCK, Role.FP4: FP4_GROUP if shard.dim == 1 else 1}.get(role, 1)
    packed = 2 if role is Role.FP4 and shard.dim == 1 else 1
    if shard.start % unit:
        raise CheckpointError(f"{name}: a shard from {shard.start} cuts a scale's block of {unit}")
    payload = Shard(shard.dim, shard.start // packed, -(-shard.stop // packed))
    return payload, Shard(shard.dim, shard.start // unit, -(-shard.stop // unit))


def _problems(specs: Mapping[str, TensorSpec], sources: Mapping[str, Source]) -> list[str]:
    """Every difference between what should be there and what is, as text."""
    found: list[str] = []
    for name, spec in specs.items():
        source = sources.get(name)
        if source is None:
            found.append(f"{name} is missing (expected {'/'.join(spec.dtypes)} {list(spec.shape)})")
        elif source.shape != spec.shape:
            found.append(f"{name} has shape {list(source.shape)}, expected {list(spec.shape)}")
        elif source.dtype not in spec.dtypes:
            found.append(f"{name} is {source.dtype}, expected {'/'.join(spec.dtypes)}")
    found += [f"{name} is extra ({sources[name].file.name})" for name in sources if name not in specs]
    return found


def _floats(raw: Tensor, dtype: torch.dtype) -> Tensor:
    if not bool(raw.isfinite().all()):
        raise CheckpointError(f"{int((~raw.isfinite()).sum())} of {raw.numel()} values are NaN or infinite")
    return raw.to(dtype)


class _Files:
    """Memory-mapped shards, opened when first needed."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, Any] = {}

    def read(self, source: Source, shard: Shard) -> Tensor:
        """The part of a tensor that `shard` names, on the CPU. raises CheckpointError."""
        try:
            if source.file not in self._open:
                handle = safetensors.safe_open(source.file, framework="pt", device="cpu")
                self._open[source.file] = self._stack.enter_context(handle)
            part = self._open[source.file].get_slice(source.key)
            cut = [slice(0, size) for size in source.shape]
            cut[shard.dim] = slice(shard.start, shard.stop)
            if source.expert < 0:
                tensor: Tensor = part[tuple(cut)]
                return tensor
            rows = slice(source.rows[0] + cut[0].start, min(source.rows[0] + cut[0].stop, source.rows[1]))
            stacked: Tensor = part[source.expert, rows, cut[1]]
            return stacked
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{source.file}: can't read {source.key}: {error}") from error
