"""What a rank's device thread builds at start-up: weights, cache, and the runner that owns them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.actors.capacity import CostTable
from engine.cache_sizes import CacheSizes, cache_sizes, free_host_bytes
from engine.config import Settings
from engine.errors import ConfigError
from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.messages import RunStep, Sampling, SlotBind, StepDone
from engine.model.checkpoint import load_checkpoint
from engine.model.config import ModelConfig
from engine.model.dummy import dummy_weights
from engine.model.groups import ALONE, Groups
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.share import share_of
from engine.runner.step import StepRunner
from engine.threads import choose_threads

Say = Callable[[str], None]
"""Prints one line of progress."""

WARM_TOKENS = 16
SAID_PARTS = 10


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank that can run steps, and what its scheduler must know of it.

    eos_ids  tokens that end a request unless it ignores them
    block    drafted tokens of a round; 0: no draft was loaded
    costs    of its steps, for the budget of drafts; None: not measured
    """

    runner: StepRunner
    config: ModelConfig
    sizes: CacheSizes
    eos_ids: tuple[int, ...]
    block: int = 0
    costs: CostTable | None = None

    def execute(self, job: RunStep) -> StepDone:
        """Runs one step; on the device thread only."""
        return self.runner.execute(job)


def load_rank(settings: Settings, say: Say, groups: Groups = ALONE) -> Loaded:
    """Loads a rank's part of the model, sizes its cache, warms it up. Call it on the device thread.

    groups  the ranks that this one acts with; their steps of the warm-up meet
    raises  ConfigError, CheckpointError
    """
    begin = time.perf_counter()
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    say(f"loading {settings.model_path} ({settings.load_format}, {settings.dtype}, {settings.device})")
    config, weights = _weights(settings, groups, dtype, device, say)
    model = DeepseekV4(
        config,
        weights,
        device=device,
        dtype=dtype,
        deterministic=settings.deterministic,
        kv_rounding="none",
        ops=operations(settings),
        groups=groups,
        split_head=settings.enable_dp_lm_head,
    )
    # Ranks on the CPU share the host's memory, each of those on devices has its own.
    free = free_host_bytes() // groups.dp.size if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    sizes = cache_sizes(config, settings, dtype.itemsize, free)
    state = KVState(config, sizes.slots, sizes.full_pages, sizes.window_pages, device, dtype)
    say(
        f"cache: {sizes.full_pages - 1} full and {sizes.window_pages - 1} window pages of 256 tokens, "
        f"{sizes.slots - 1} slots, {sizes.bytes >> 20} MiB"
    )
    eos_ids = eos_of(config, Path(settings.model_path))
    loaded = Loaded(StepRunner(model, state, eos_ids), config, sizes, eos_ids)
    warm_up(loaded, settings, say)
    say(f"ready after {time.perf_counter() - begin:.1f} s")
    return loaded


def operations(settings: Settings) -> TorchOps | None:
    """C kernels, row-invariant, for float32 on the CPU; else the model's own choice."""
    return CpuOps() if (settings.device, settings.dtype) == ("cpu", "float32") else None


def _weights(
    settings: Settings, groups: Groups, dtype: torch.dtype, device: torch.device, say: Say
) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    config = ModelConfig.from_json(settings.model_path)
    share = share_of(config, groups, split_head=settings.enable_dp_lm_head)
    if settings.load_format == "dummy":
        return config, dummy_weights(config, dtype, device, rule=share.rule)

    def progress(done: int, total: int, name: str) -> None:
        if done == total or done * SAID_PARTS // total != (done - 1) * SAID_PARTS // total:
            say(f"loaded {done} of {total} tensors")

    return load_checkpoint(settings.model_path, dtype, device, rule=share.rule, progress=progress)


def eos_of(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """End tokens: those of generation_config.json where it names some, else the configuration's one."""
    file = folder / "generation_config.json"
    named = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = [config.eos_token_id] if named is None else named if isinstance(named, list) else [named]
    if not all(isinstance(token, int) and 0 <= token < config.vocab_size for token in ids):
        raise ConfigError(
            f"{file}: eos_token_id is {named!r}, but the vocabulary has {config.vocab_size} tokens"
        )
    return tuple(ids)


def warm_up(loaded: Loaded, settings: Settings, say: Say) -> None:
    """Runs real steps in slot 1: packs weights, chooses the threads, and leaves the slot to be bound anew.

    Every rank runs the same steps at once, so that their collectives meet.
    """
    sampling = Sampling(max_new_tokens=1)
    step = [0]

    def column(*values: int) -> bytes:
        return np.array(values, np.int32).tobytes()

    def one_step(start: int, count: int) -> StepDone:
        step[0] += 1
        bound = start == 0
        return loaded.execute(
            RunStep(
                epoch=-step[0],
                mode="extend" if bound else "decode",
                slots=column(1),
                generations=column(0),
                starts=column(start),
                counts=column(count),
                tokens=column(*range(count)),
                samples=b"\1",
                ranks=((-1, count, 1),) * loaded.runner.model.groups.dp.size,
                pages=column(1, 0, 1, 1) if bound else b"",
                binds=(SlotBind(1, 0, 0, 0, sampling, WARM_TOKENS),) if bound else (),
            )
        )

    def work() -> None:
        one_step(0, WARM_TOKENS)
        for position in range(WARM_TOKENS, WARM_TOKENS + 4):
            one_step(position, 1)

    if settings.device == "cpu":
        choose_threads(settings.threads, torch.set_num_threads, work, say, settings.dp_size)
    else:
        work()
