"""`python -m engine serve`: the server."""

from __future__ import annotations

import argparse

from engine.config_sources import add_arguments, printed, resolve
from engine.launch import CLEAN, REFUSED, serve
from engine.rank_process import sayer

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    from engine.errors import ConfigError

    try:
        settings, sources = resolve(args)
        if args.print_config:
            print(printed(settings, sources), end="")
            return CLEAN
        return serve(settings)
    except ConfigError as error:
        sayer("api")(str(error))
        return REFUSED
