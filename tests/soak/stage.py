"""A server with the trivial rank for soaks, and faults planted in it.

`serve FLAGS` serves; `rank FD` is its rank's process; `soak FLAGS` is the command over such a server.
SOAK_FAULT=all: answers change and descriptors leak after a while, and then the first rank dies.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from engine.commands import soak
from engine.config import Settings
from engine.config_sources import add_flags, resolve
from engine.launch import serve
from engine.messages import RunStep, StepDone
from engine.rank_process import run_process
from tests.actors.trivial import TOKEN, OneToken, TrivialParts

FAULTY = os.environ.get("SOAK_FAULT", "") == "all"
OTHER_AT, DEAD_AFTER_S = 400, 18.0
"""The step from which on answers differ, and how long after it the rank dies."""

LEAK_FROM, LEAK_EACH = 60, 2
"""Requests before descriptors are leaked, and how often."""


class Faulty(OneToken):
    """Another token from some step on; dead some time later."""

    _other_s = 0.0

    def execute(self, job: RunStep) -> StepDone:
        done = super().execute(job)
        if job.epoch < OTHER_AT:
            self._other_s = time.monotonic()
            return done
        if time.monotonic() > self._other_s + DEAD_AFTER_S:
            os._exit(3)
        sampled = len(done.token_ids) // 4
        return msgspec.structs.replace(done, token_ids=np.full(sampled, TOKEN + 1, np.int32).tobytes())


class StageParts(TrivialParts):
    """Parts of a rank, faulty or not."""

    def load(self, settings: Settings, say: Callable[[str], None]) -> OneToken:
        runner = super().load(settings, say)
        return Faulty("") if FAULTY else runner


def leak() -> None:
    """Requests leave descriptors open."""
    from api.app import App

    count, kept, answer = [0], [], App._http

    async def leaking(self: App, exchange: Any) -> None:
        count[0] += exchange.method == "POST"
        if count[0] > LEAK_FROM and count[0] % LEAK_EACH == 0:
            kept.append(os.open("/dev/zero", os.O_RDONLY))
        await answer(self, exchange)

    App._http = leaking  # type: ignore[method-assign]


def main(argv: list[str]) -> int:
    """Serves, runs a rank, or soaks."""
    parser = argparse.ArgumentParser()
    if argv[0] == "rank":
        run_process(int(argv[1]), StageParts())
    if argv[0] == "soak":
        soak.add_arguments(parser)
        return soak.run(parser.parse_args(argv[1:]), (sys.executable, __file__, "serve"))
    add_flags(parser)
    if FAULTY:
        leak()
    settings, _ = resolve(parser.parse_args(argv[1:]))
    settings = dataclasses.replace(settings, threads=1, dp_exchange="links", speculative_algorithm="")
    return serve(settings, (sys.executable, __file__, "rank"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
