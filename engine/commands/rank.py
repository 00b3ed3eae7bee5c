"""`python -m engine rank`: one rank's process; `serve` starts it and writes it its settings."""

from __future__ import annotations

import argparse

from engine.allocator import keep_freed_memory
from engine.rank_parts import ModelParts
from engine.rank_process import run_process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The descriptor of the link."""
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the link to the api process")


def run(args: argparse.Namespace) -> int:
    """Runs the rank; doesn't return."""
    keep_freed_memory()
    run_process(args.fd, ModelParts())
    return 0
