"""One rank of `bench step`: its share of a dummy model, and every case run, timed and taken apart."""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.step_case import Case, Context, filled, planned, shortened
from bench.step_floor import Routed, Work, step_work
from bench.step_parity import parity
from bench.step_time import Captured, Rates, Recorder, breakdown, measured_rates, milliseconds
from engine.cache_format import cache_format
from engine.cache_sizes import bytes_of
from engine.config import Settings
from engine.kernel_sets import operations
from engine.model.config import KVFormat, ModelConfig
from engine.model.groups import Groups
from engine.model.model import DeepseekV4
from engine.rank_weights import rank_weights
from engine.runner.collectives import close_groups, open_groups
from engine.runner.forward import commit_step, forward
from engine.runner.near import bytes_of_steps, open_near
from engine.start_memory import MemoryTable, weights_by_kind

SILENT_S = 120.0
EAGER_RUNS = 5
"""Of a prompt's chunk, which takes long and varies little."""
WORKSPACE = 8 << 30
"""Bytes that a step's intermediate values and its graph may take."""


@dataclass(frozen=True)
class Job:
    """What a rank is started for.

    settings     geometry, device, type and kernel set; weights are dummies
    layers       of the geometry that are built; 0: all
    repeats      timed runs of a case
    parity       a few layers are compared with their oracle, and with one rank, before
    collectives  experts' rows go by collectives also where devices reach each other's memory
    """

    settings: Settings
    layers: int
    cases: Sequence[Case]
    repeats: int
    parity: bool = False
    collectives: bool = False

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.settings.dp_size


def largest_of(job: Job) -> Settings:
    """The job's settings, with its largest case as the largest chunk."""
    rows = max((case.requests * case.width for case in job.cases), default=1)
    return replace(job.settings, chunked_prefill_size=rows)


def live(rank: int, job: Job, meet_at: str, pipe: Connection) -> None:
    """A rank's process. It tells ("parity", figures) where asked, ("loaded", figures), then ("row", figures)
    a case; or ("failed", text).
    """
    torch.set_num_threads(1)
    device = torch.device(job.settings.device, rank if job.settings.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        groups = open_groups(rank, job.ranks, job.settings.ep_size, device, meet_at, SILENT_S)
        try:
            if not job.collectives:
                size = bytes_of_steps(largest_of(job))
                groups = open_near(groups, device, size, SILENT_S, print)
            measure(job, groups, device, pipe)
        finally:
            gc.collect()
            close_groups(groups)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        raise


def measure(job: Job, groups: Groups, device: torch.device, pipe: Connection) -> None:
    """Loads, then runs every case that fits."""
    if job.parity:
        pipe.send(("parity", parity(job.settings, groups, device)))
        gc.collect()
    rates = measured_rates(device)
    begin = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
    if begin is not None:
        begin.record()
    model, recorder, told = load(job, groups, device)
    if begin is not None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        told["load_s"] = round(1e-3 * begin.elapsed_time(end), 2)
    way = "collectives" if groups.ep.near is None else "memory"
    pipe.send(("loaded", {**told, "rates": asdict(rates), "kernels": model.ops.name, "experts_by": way}))
    for case in job.cases:
        kv = cache_format(job.settings, model.config)
        room = fits(case, model, kv)
        figures = row(job, model, recorder, case, rates) if room else skipped(case, model, kv)
        pipe.send(("row", figures))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def load(job: Job, groups: Groups, device: torch.device) -> tuple[DeepseekV4, Recorder, dict[str, Any]]:
    """The rank's model of dummy weights, and what its memory holds by kind, in MiB."""
    settings, dtype = job.settings, getattr(torch, job.settings.dtype)
    config = shortened(ModelConfig.from_json(settings.model_path), job.layers)
    ops, table = operations(settings), MemoryTable(device)
    with (
        table.taking("the weights", lever="fewer --layers"),
        rank_weights(settings, config, groups, print, keeps=ops.keeps) as weights,
    ):
        model = DeepseekV4(
            config, weights, device=device, dtype=dtype, deterministic=False, kv_rounding="none", ops=ops,
            groups=groups, split_head=settings.enable_dp_lm_head,
        )  # fmt: skip
    sizes = {kind: round(size / 2**20, 1) for kind, size in weights_by_kind(model, None).items()}
    return model, Recorder(model), {"weights_mib": sizes, "layers": config.num_hidden_layers}


def fits(case: Case, model: DeepseekV4, kv: KVFormat) -> bool:
    """Whether every rank has room for the case's caches, and for the work on them."""
    if model.device.type == "cpu":
        return True
    room = int(cache_bytes(case, model, kv) + WORKSPACE < torch.cuda.mem_get_info(model.device)[0])
    if model.groups.dp.size == 1:
        return bool(room)
    assert model.groups.dp.cpu is not None
    return bool(model.groups.dp.cpu.gather(torch.tensor([room])).min())


def peer_bytes(model: DeepseekV4, rows: int) -> int:
    """What a rank gets from its peers in a step of so many agreed rows, over all layers."""
    peers, choices = model.groups.ep.size - 1, model.config.num_experts_per_tok
    wide = model.config.hidden_size * model.dtype.itemsize
    return peers * len(model.layers) * rows * (wide + 8 * choices + choices * wide)


def cache_bytes(case: Case, model: DeepseekV4, kv: KVFormat) -> int:
    """Of the pools of a case."""
    pages = Context(case, model.config.sliding_window)
    units = {"full": pages.full_pages, "window": pages.window_pages, "slot": pages.slots}
    size = model.dtype.itemsize
    return sum(bytes_of(model.config, space, size, kv) * count for space, count in units.items())


def skipped(case: Case, model: DeepseekV4, kv: KVFormat) -> dict[str, Any]:
    """The row of a case that doesn't fit beside this many layers."""
    return {
        "kind": case.kind, "rows_per_rank": case.requests * case.width, "context": case.context,
        "layers": model.config.num_hidden_layers,
        "skipped": f"no room for {cache_bytes(case, model, kv) >> 20} MiB of caches",
    }  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Milliseconds of a case's runs and of its commit; where they go on a device."""

    runs: list[float]
    commit: float
    graph: bool
    parts: dict[str, float]
    kernels: list[dict[str, Any]]


def row(job: Job, model: DeepseekV4, recorder: Recorder, case: Case, rates: Rates) -> dict[str, Any]:
    """Figures of one case on this rank. raises ValueError for logits that are no numbers"""
    kv = cache_format(job.settings, model.config)
    state = filled(model.config, case, model.device, model.dtype, kv)
    plan = planned(state, case, model, job.ranks, seed=model.groups.dp.rank)
    pending = model.new_pending(plan.batch.load.padded_tokens, 0)

    def step() -> torch.Tensor:
        return forward(model, state, plan, pending).logits

    routed = [Routed(*layer) for layer in recorder.run(step)]
    if not bool(step().isfinite().all()):
        raise ValueError(f"{case}: logits that are no numbers")
    told = timed(case, step, lambda: commit_step(model, state, plan, pending), job.repeats, model.device)
    model.ops.check()
    work = step_work(model, state, case, routed)
    return {
        **figures(case, told, work, rates), "layers": model.config.num_hidden_layers,
        "distinct_experts": round(statistics.mean(layer.distinct for layer in routed), 1),
        "choices": round(statistics.mean(layer.choices for layer in routed), 1),
        "kv_mib": round(cache_bytes(case, model, kv) / 2**20, 1), "kv": kv,
        "peer_bytes": peer_bytes(model, plan.batch.agreed_rows),
        "parts": told.parts, "breakdown": told.kernels,
    }  # fmt: skip


def timed(
    case: Case, step: Callable[[], object], commit: Callable[[], object], repeats: int, device: torch.device
) -> Timed:
    """Runs the case, captured where it asks for it and there is a device."""
    run, graph = step, case.graph and device.type == "cuda"
    if graph:
        # A run before the capture, for what is compiled at first use. It fails where the host waits for the
        # device, and tells the place, which a capture wouldn't.
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        run = Captured(step)
    try:
        run()
        runs = milliseconds(run, repeats if graph else min(repeats, EAGER_RUNS), device)
        parts, kernels = breakdown(run) if device.type == "cuda" else ({}, [])
    finally:
        if isinstance(run, Captured):
            run.free()
    commit()
    return Timed(runs, statistics.median(milliseconds(commit, repeats, device)), graph, parts, kernels)


def figures(case: Case, told: Timed, work: Work, rates: Rates) -> dict[str, Any]:
    """Time against the floor; the commit, which is eager, stands beside it."""
    read = work.bytes / rates.read
    computed = work.quantised / rates.fp8 + work.floats / rates.bf16
    ms, floor = statistics.median(told.runs), 1e3 * max(read, computed)
    return {
        "kind": case.kind, "rows_per_rank": case.requests * case.width, "requests": case.requests,
        "context": case.context, "graph": told.graph, "ms": round(ms, 4), "ms_low": round(min(told.runs), 4),
        "ms_high": round(max(told.runs), 4), "commit_ms": round(told.commit, 4), "bytes": int(work.bytes),
        "bandwidth": round(work.bytes / (1e-3 * ms)), "floor_ms": round(floor, 4),
        "bound": "bytes" if read >= computed else "operations", "ratio": round(ms / floor, 2),
    }  # fmt: skip
