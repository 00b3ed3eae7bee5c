"""What a rank's device thread builds at start-up: weights, cache, and the runner that owns them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from engine.cache_format import cache_format
from engine.cache_sizes import CacheSizes, cache_sizes, free_host_bytes
from engine.config import Settings
from engine.cost_table import cost_table_for, subject_of
from engine.errors import ConfigError
from engine.grammar.pipeline_counters import PATH
from engine.grammar.rank_grammars import RankGrammars, rank_grammars
from engine.kernel_sets import operations
from engine.largest_steps import LargestSteps, admitted, measured, told_of_steps
from engine.loaded import Loaded
from engine.memory.pages import ASIDE
from engine.memory.pools import KVState
from engine.model.config import KVFormat, ModelConfig, eos_of
from engine.model.draft import Drafter
from engine.model.draft_loading import load_drafter
from engine.model.groups import ALONE, Groups
from engine.model.model import DeepseekV4
from engine.model.quantised import Stored
from engine.model.stand_in import stands_in, text_folder, told_of_stand_in
from engine.rank_weights import Say, rank_weights
from engine.runner.graph_start import record_graphs
from engine.runner.speculative import VERIFY_MODES, Speculation, VerifyMode, slot_bytes
from engine.runner.step import StepRunner
from engine.runner.taps import TAP_ROWS
from engine.start_memory import MemoryTable, free_device_bytes, least_of_ranks, weights_by_kind
from engine.warm_up import warm_up

_FEWER_WEIGHTS = "more ranks that share the routed experts, --ep-size with --dp-size"
_FEWER_EXPERTS = "more ranks that share them, --ep-size with --dp-size"
_FEWER_PAGES = "lower --max-total-tokens, --max-running-requests or --mem-fraction-static"
_SMALLER_STEPS = (
    "lower --chunked-prefill-size, --max-running-requests, --context-length or --mem-fraction-static"
)

_MODES: dict[str, VerifyMode] = {mode: mode for mode in VERIFY_MODES}


def load_rank(settings: Settings, say: Say, groups: Groups = ALONE) -> Loaded:
    """Loads a rank's part of the model, sizes its cache, warms it up. Call it on the device thread.

    groups  the ranks that this one acts with; their steps of the warm-up meet
    raises  ConfigError, CheckpointError
    """
    begin = time.perf_counter()
    device = torch.device(settings.device)
    say(f"loading {settings.model_path} ({settings.load_format}, {settings.dtype}, {settings.device})")
    config, memory = ModelConfig.from_json(settings.model_path), MemoryTable(device)
    if stands_in(settings, config.vocab_size):
        say(told_of_stand_in(settings, config.vocab_size))
    kv = cache_format(settings, config)
    with memory.taking("the weights", lever=_FEWER_WEIGHTS):
        model, drafter = _models(config, settings, groups, say)
    weights = _note_weights(memory, model, drafter)
    sizes, state, speculation = _cache(model, drafter, settings, kv, groups, memory, say)
    _note_cache(memory, state, sizes)
    say(_told_of_cache(sizes, kv))
    block, eos_ids = 0 if drafter is None else drafter.block, eos_of(config, Path(settings.model_path))
    text = text_folder(settings, config.vocab_size)
    with memory.taking("the workspaces of steps, and graphs", lever=_SMALLER_STEPS):
        grammars = rank_grammars(text, config.vocab_size, eos_ids, device, sizes.slots, block + 1)
        masks = None if grammars is None else grammars.pipeline
        runner = StepRunner(model, state, eos_ids, speculation, masks)
        say(f"sampling: {runner.choices.name}")
        warm_up(runner, settings, say)
        record_graphs(runner, settings, sizes.context_length, say)
        if device.type == "cuda":
            # Last: each capture gives back to the device what the allocator has kept.
            LargestSteps(runner, admitted(settings, sizes, block), say).run()
    memory.note_rest("workspaces and graphs", _SMALLER_STEPS)
    if groups.ep.near is not None:
        memory.note("experts' rows of other ranks", groups.ep.near.regions[0].numel(), _SMALLER_STEPS)
    for line in memory.lines():
        say(line)
    costs = cost_table_for(settings, subject_of(runner), say) if _scheduled(speculation) else None
    if speculation is not None:
        speculation.forget()
    if grammars is not None:
        say(_told_of_grammars(grammars))
    took_s = time.perf_counter() - begin
    say(f"ready after {took_s:.1f} s")
    return Loaded(runner, config, sizes, eos_ids, block, costs, grammars, weights, took_s, model.ops.name)


def _cache(
    model: DeepseekV4,
    drafter: Drafter | None,
    settings: Settings,
    kv: KVFormat,
    groups: Groups,
    memory: MemoryTable,
    say: Say,
) -> tuple[CacheSizes, KVState, Speculation | None]:
    """The cache of a model, as large as the settings say beside what steps take. raises ConfigError"""
    config, device, dtype = model.config, model.device, model.dtype
    draft_bytes = 0 if drafter is None else slot_bytes(drafter, config, dtype)
    sized = partial(cache_sizes, config, settings, dtype.itemsize, draft_bytes=draft_bytes, kv=kv)
    cache = partial(KVState, config, device=device, dtype=dtype, kv=kv)
    if device.type == "cpu":
        # Ranks share the host's memory, of which steps take little and give it back.
        sizes = sized(least_of_ranks(free_host_bytes() // groups.dp.size, groups))
    else:
        most = sized(least_of_ranks(free_device_bytes(device), groups))
        with memory.taking("the largest steps", lever=_SMALLER_STEPS):
            taken = measured(model, drafter, settings, most, cache, say)
        say(told_of_steps(taken))
        left = max(0, free_device_bytes(device) - taken.kept(settings))
        sizes = sized(least_of_ranks(left, groups))
    with memory.taking("the cache", sizes.bytes, _FEWER_PAGES):
        state = cache(sizes.slots, sizes.full_pages, sizes.window_pages)
        speculation = _speculation(drafter, state, settings, say)
    return sizes, state, speculation


def _note_weights(memory: MemoryTable, model: DeepseekV4, drafter: Drafter | None) -> int:
    """Bytes of all weights, noted by kind."""
    for kind, size in weights_by_kind(model, drafter).items():
        memory.note(f"weights: {kind}", size, _FEWER_EXPERTS if kind == "routed experts" else "")
    return memory.bytes


def _note_cache(memory: MemoryTable, state: KVState, sizes: CacheSizes) -> None:
    """Every pool, and what drafting keeps of the slots."""
    pools = state.bytes_by_pool()
    for name, size in pools.items():
        memory.note(f"cache: {name}", size, _FEWER_PAGES)
    memory.note("cache: drafts", sizes.bytes - sum(pools.values()), _FEWER_PAGES)


def _told_of_grammars(grammars: RankGrammars) -> str:
    """Waits for the library, which was loaded beside everything else."""
    return f"grammars: {len(grammars.compiler.vocabulary.tokens)} tokens, {PATH}"


def _speculation(drafter: Drafter | None, state: KVState, settings: Settings, say: Say) -> Speculation | None:
    if drafter is None:
        return None
    speculation = Speculation(drafter, state, _MODES[settings.speculative_verify_mode])
    say(told_of(drafter, state.config, speculation))
    return speculation


def _scheduled(speculation: Speculation | None) -> bool:
    """Whether drafts are cut by what steps cost."""
    return speculation is not None and speculation.mode != "static"


def _told_of_cache(sizes: CacheSizes, kv: KVFormat) -> str:
    kept = "FP8 rows" if kv == "fp8" else "values of the model's type"
    return (
        f"cache: {kept}, {sizes.full_pages - 1 - ASIDE} full and {sizes.window_pages - 1 - ASIDE} window "
        f"pages of 256 tokens, {sizes.slots - 1 - ASIDE} slots, {sizes.bytes >> 20} MiB"
    )


def _models(
    config: ModelConfig, settings: Settings, groups: Groups, say: Say
) -> tuple[DeepseekV4, Drafter | None]:
    """Target and draft, each weight read once and gone when it has its place. raises CheckpointError."""
    ops = operations(settings)
    say(f"operations: {ops.name}" + ("; weights stay as they are stored" if ops.keeps else ""))
    with rank_weights(settings, config, groups, say, keeps=ops.keeps) as weights:
        model = DeepseekV4(
            config,
            weights,
            device=settings.device,
            dtype=getattr(torch, settings.dtype),
            deterministic=settings.deterministic,
            kv_rounding="none",
            ops=ops,
            groups=groups,
            split_head=settings.enable_dp_lm_head,
        )
        return model, _drafter(config, weights, model, settings)


def _drafter(
    config: ModelConfig, weights: Mapping[str, Stored], model: DeepseekV4, settings: Settings
) -> Drafter | None:
    """The checkpoint's draft; None where the settings ask for none.

    raises  CheckpointError where it has none, or a broken one; ConfigError
    """
    if not settings.speculative_algorithm:
        return None
    block = settings.speculative_num_draft_tokens
    if not 0 <= block < TAP_ROWS:
        raise ConfigError(f"--speculative-num-draft-tokens is {block}, but must be in [0, {TAP_ROWS - 1}]")
    return load_drafter(config, weights, model, block=block)


def told_of(drafter: Drafter, config: ModelConfig, speculation: Speculation) -> str:
    """One line on what drafts."""
    parts = [f"{drafter.block} tokens a round", f"taps of layers {', '.join(map(str, drafter.taps))}"]
    if config.dspark is not None:
        temperatures = ", ".join(f"{value:g}" for value in config.dspark.sts_temperatures)
        parts += [f"Markov rank {config.dspark.markov_rank}", f"confidence temperatures {temperatures}"]
    return f"draft: {'; '.join(parts)}; mode {speculation.mode}, {speculation.bytes >> 20} MiB"
