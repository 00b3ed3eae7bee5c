"""The table of what steps cost, kept as JSON: valid for one machine and model, measured where none is."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.actors.capacity import CostTable, Curve
from engine.cache_format import cache_format
from engine.config import Settings
from engine.cost_cells import LEAST_ROUNDS, Measured, Say, Stage, Subject, cells_of, measure
from engine.cost_fit import errors, fit
from engine.errors import ConfigError, CostTableUnreadable
from engine.kernel_sets import kernel_set
from engine.model.config import ModelConfig
from engine.runner.step import StepRunner

Key = dict[str, Any]

VERSION = 1
START_UP_S = 3.0
"""What a server that finds no table spends on one."""


# ---- keep ----------------------------------------------------------------------------------------


def key_of(settings: Settings, block: int) -> Key:
    """What a table is valid for: the machine, the model, and how it runs. Equal keys, equal costs."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if settings.device == "cuda" else "",
        "model": model_digest(Path(settings.model_path)),
        "dtype": settings.dtype,
        "device": settings.device,
        "kernels": kernel_set(settings),
        "kv": cache_format(settings, ModelConfig.from_json(settings.model_path)),
        "graphs": settings.device == "cuda" and not settings.disable_cuda_graph,
        "deterministic": settings.deterministic,
        "dp": settings.dp_size,
        "ep": settings.ep_size,
        "split_head": settings.enable_dp_lm_head,
        "mode": settings.speculative_verify_mode,
        "block": block,
    }


def model_digest(folder: Path) -> str:
    """SHA-256 of the configuration and of the names and sizes of the weight files: weights themselves cost
    the same whatever they are."""
    told = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        told.update(f"{file.name} {file.stat().st_size}\n".encode())
    return told.hexdigest()


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def default_path(key: Key) -> Path:
    """Where the table of this key is kept unless --speculative-cost-table says otherwise."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache / "deepseek-actor-engine" / "cost-tables" / f"{digest[:16]}.json"


def save(path: Path, key: Key, table: CostTable, measured: Sequence[Measured]) -> None:
    """Writes the table and the cells that it comes from; readers see the whole file or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "version": VERSION,
        "key": key,
        "bias": table.bias,
        "requests": table.requests.points,
        "rows": table.rows.points,
        "drafting": table.drafting.points,
        "cells": [(*one.cell, one.seconds) for one in measured],
    }
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def load(path: Path) -> tuple[Key, CostTable]:
    """A saved table and what it is valid for.

    raises  CostTableUnreadable with the file's name and what is wrong with it; OSError where there is none
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["version"] != VERSION:
            raise ValueError(f"version {document['version']}, not {VERSION}")
        curves = {name: _curve(document, name) for name in ("requests", "rows", "drafting")}
        bias = float(document["bias"])
        if not 0.0 <= bias < float("inf"):
            raise ValueError(f"bias is {bias}")
        return dict(document["key"]), CostTable(bias, **curves)
    except (ValueError, KeyError, TypeError) as error:
        told = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise CostTableUnreadable(
            f"{path}: no table of what steps cost ({told}); delete it, or write it anew with bench cost-table"
        ) from error


def _curve(document: Mapping[str, Any], name: str) -> Curve:
    at, seconds = (list(map(float, column)) for column in zip(*document[name], strict=True))
    if not np.isfinite([*at, *seconds]).all() or seconds[0] < 0 or (np.diff(seconds) < 0).any():
        raise ValueError(f"{name} holds {seconds}, which fall or are no times")
    return Curve(at, seconds)


# ---- a server's table ----------------------------------------------------------------------------


def subject_of(runner: StepRunner) -> Subject:
    """This runner, whose speculation is on, with as many requests as have a slot and a page."""
    if runner.speculation is None:
        raise ConfigError("costs of steps are measured with drafts, but nothing drafts; see --speculative")
    state, model, graphs = runner.state, runner.model, runner.path.graphs
    return Subject(
        execute=runner.execute,
        block=runner.speculation.block,
        requests=min(state.slots, state.full_pages, state.window_pages) - 1,
        vocab_size=model.config.vocab_size,
        ranks=model.groups.dp.size,
        meets=model.needs_every_rank,
        captured=() if graphs is None else graphs.tokens,
    )


def cost_table_for(settings: Settings, subject: Subject, say: Say) -> CostTable:
    """The saved table of this machine and model, or one measured now; on the device thread.

    A file that isn't there is written; one of another machine or model is left alone.

    raises  CostTableUnreadable
    """
    key = key_of(settings, subject.block)
    path = Path(settings.speculative_cost_table) if settings.speculative_cost_table else default_path(key)
    if path.exists():
        saved, table = load(path)
        differs = [
            f"{name} {saved.get(name)!r}, here {key[name]!r}" for name in key if saved.get(name) != key[name]
        ]
        if not differs:
            say(f"costs of steps: {path}")
            return table
        say(f"costs of steps: {path} is of another machine or model ({'; '.join(differs)}); measuring anew")
        return measured_table(subject, say)[0]
    table, measured = measured_table(subject, say)
    try:
        save(path, key, table, measured)
    except OSError as error:
        say(f"costs of steps: measured, but {path} can't be written: {error}")
    return table


def measured_table(subject: Subject, say: Say, rounds: int = 0) -> tuple[CostTable, list[Measured]]:
    """A table from every cell in `rounds` rounds; 0: from fewer cells, in about START_UP_S.

    Where ranks meet, which run the same steps, the time counts for nothing, and it is LEAST_ROUNDS.
    """
    stage = Stage(subject)
    cells = cells_of(subject.requests, subject.block, quick=not rounds)
    budget_s = None if rounds or subject.meets else START_UP_S
    measured = measure(stage.run_cell, cells, say, budget_s, rounds or LEAST_ROUNDS)
    table = fit(measured)
    off = np.abs(errors(table, measured))
    say(f"costs of steps: fitted within {np.median(off):.1%} (median), {off.max():.1%} (worst)")
    return table, measured
