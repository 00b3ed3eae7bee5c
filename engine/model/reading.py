"""A rank's weights, each read from its file when it is asked for, so that few are there at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.quant import decode_e8m0, dequantise_fp4_groups, dequantise_fp8_blocks
from engine.model.quantised import Fp4Weight, Fp8Weight, Stored
from engine.model.shards import RankWeights, Shard, ShardRule, stored_shards
from engine.model.sources import Source
from engine.model.tensor_specs import Role, TensorSpec, scale_name

Progress = Callable[[int, int, str], None]
"""Called after each tensor with tensors done, tensors in all, and its name."""


class CheckpointWeights(RankWeights):
    """Weights of one rank by DeepSeek's names; a context that holds the files open.

    experts   number of routed experts, for tables
    keeps     FP8 and FP4 stay as they are stored; else they are dequantised
    progress  called when a name is read for the first time
    raises    CheckpointError, on access, naming the tensor whose content is wrong
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], sources: Mapping[str, Source], experts: int,
        dtype: torch.dtype, device: torch.device, rule: ShardRule, progress: Progress, *, keeps: bool,
    ) -> None:  # fmt: skip
        super().__init__(specs, rule)
        self._sources, self._experts = sources, experts
        self._dtype, self._device, self._progress, self._keeps = dtype, device, progress, keeps
        self._read: set[str] = set()
        self._stack = ExitStack()
        self._files = _Files(self._stack)

    def __enter__(self) -> CheckpointWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Stored:
        found = self._load(name, self._shards[name])
        if name not in self._read:
            self._read.add(name)
            self._progress(len(self._read), len(self._shards), name)
        return found

    @property
    def unread(self) -> list[str]:
        """Names that nobody has asked for, in order."""
        return sorted(self._shards.keys() - self._read)

    def _load(self, name: str, shard: Shard) -> Stored:
        role = self._specs[name].role
        stored, scale_shard = stored_shards(name, role, shard)
        raw = self._files.read(self._sources[name], stored).to(self._device)
        try:
            if role in (Role.FP8, Role.FP4):
                scale = self._files.read(self._sources[scale_name(name)], scale_shard).to(self._device)
                return self._kept(raw, scale, role) if self._keeps else self._values(raw, scale, role)
            if role is Role.TABLE:
                return self._table(raw)
            return _floats(raw, torch.float32 if role is Role.FP32 else self._dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error

    def _values(self, raw: Tensor, scale: Tensor, role: Role) -> Tensor:
        dequantise = dequantise_fp8_blocks if role is Role.FP8 else dequantise_fp4_groups
        return dequantise(raw, scale, self._dtype)

    def _kept(self, raw: Tensor, scale: Tensor, role: Role) -> Fp8Weight | Fp4Weight:
        decode_e8m0(scale)
        if role is Role.FP4:
            return Fp4Weight(raw.view(torch.uint8), scale.view(torch.uint8))
        if bool(((raw.view(torch.uint8) & 0x7F) == 0x7F).any()):
            raise CheckpointError("FP8 weight holds NaN codes")
        return Fp8Weight(raw, scale.view(torch.uint8))

    def _table(self, raw: Tensor) -> Tensor:
        low, high = int(raw.min()), int(raw.max())
        if low < 0 or high >= self._experts:
            raise CheckpointError(f"holds experts {low} to {high} of {self._experts}")
        return raw.to(torch.int32)


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
                _read_ahead(source.file)
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


def _read_ahead(file: Path) -> None:
    """Lets the system read the whole file while its first tensors are used; a host's ranks share it."""
    with file.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
