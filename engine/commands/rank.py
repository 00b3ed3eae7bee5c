"""`python -m engine rank`: one rank's process, started by `serve`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The link's descriptor; the settings come on standard input."""
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the link to the api process")


def run(args: argparse.Namespace) -> int:
    """Runs the rank; doesn't return."""
    from engine.rank_parts import ModelParts
    from engine.rank_process import run_process

    run_process(args.fd, ModelParts())
    return 0
