"""`python -m engine bench cost-table`: what steps cost by requests and rows, with drafts and without.

Each cell is a real step of a runner at rest; the table that is fitted to the cells' medians is saved where
servers of this machine and model look for it, or where --speculative-cost-table (in --server-flags) says.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engine import config_sources
from engine.config import Settings
from engine.errors import ConfigError
from engine.local import prepare_environment

ROUNDS, QUICK_ROUNDS = 10, 3
"""One more than is counted."""


def settings_of(model_path: str, flags: str) -> Settings:
    """A server's settings with drafts; raises ConfigError for several ranks."""
    parser = argparse.ArgumentParser()
    config_sources.add_flags(parser)
    arguments = ["--model-path", model_path, "--speculative-algorithm", "DSPARK", *shlex.split(flags)]
    settings, _ = config_sources.resolve(parser.parse_args(arguments))
    if settings.dp_size > 1:
        raise ConfigError(
            f"--dp-size is {settings.dp_size}: servers of several ranks measure when they start"
        )
    return settings


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints, saves."""
    settings = settings_of(args.model_path, args.server_flags)
    prepare_environment(settings)
    from engine.cost_fit import errors
    from engine.cost_table import default_path, key_of, measured_table, save, subject_of
    from engine.loading import load_rank

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    runner = load_rank(settings, say).runner
    subject = subject_of(runner)
    key = key_of(settings, subject.block)
    table, measured = measured_table(subject, say, QUICK_ROUNDS if args.quick else ROUNDS)
    path = Path(settings.speculative_cost_table) if settings.speculative_cost_table else default_path(key)
    save(path, key, table, measured)
    say(f"saved as {path}")
    off = errors(table, measured)
    say(f"{'requests':>8} {'rows':>5} {'drafts':>6} {'measured ms':>12} {'table ms':>9}")
    for (cell, seconds), error in zip(measured, off.tolist(), strict=True):
        told = seconds * (1 + error)
        say(f"{cell.requests:>8} {cell.rows:>5} {cell.drafted:>6} {seconds * 1e3:>12.2f} {told * 1e3:>9.2f}")
    return {
        "key": key,
        "saved": str(path),
        "cells": [
            {"requests": cell.requests, "rows": cell.rows, "drafted": cell.drafted, "seconds": seconds}
            for cell, seconds in measured
        ],
        "table": {
            "bias": table.bias,
            "requests": table.requests.points,
            "rows": table.rows.points,
            "drafting": table.drafting.points,
        },
        "median_relative_error": float(np.median(np.abs(off))),
        "worst_relative_error": float(np.abs(off).max()),
    }
