"""`python -m engine serve`: the server."""

from __future__ import annotations

import argparse

from engine.config import add_arguments, from_arguments
from engine.launch import REFUSED, serve
from engine.rank_process import sayer

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    from engine.errors import ConfigError

    try:
        return serve(from_arguments(args))
    except ConfigError as error:
        sayer("api")(str(error))
        return REFUSED
