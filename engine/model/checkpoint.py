"""Loads a checkpoint: everything is verified from the headers first, then tensors are read one at a time
onto the target device, under DeepSeek's names, dequantised there or kept as they are stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.layout import expected_tensors, sniff_layout
from engine.model.quantised import plain
from engine.model.reading import CheckpointWeights, Progress
from engine.model.shards import ShardRule, whole
from engine.model.sources import Source, find_sources
from engine.model.tensor_specs import Layout, Role, TensorSpec

log = logging.getLogger(__name__)

_SHOWN_PROBLEMS = 8


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
        with self.weights(dtype, device, rule, lambda *_: None) as weights:
            for done, name in enumerate(names, 1):
                if name in weights:
                    yield name, plain(weights[name])
                progress(done, len(names), name)

    def weights(
        self,
        dtype: torch.dtype,
        device: torch.device,
        rule: ShardRule = whole,
        progress: Progress = log_progress,
        *,
        keeps: bool = False,
    ) -> CheckpointWeights:
        """The same by name, read on access; keeps: as of CheckpointWeights"""
        experts = self.config.n_routed_experts
        return CheckpointWeights(
            self.specs, self.sources, experts, dtype, device, rule, progress, keeps=keeps
        )


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
