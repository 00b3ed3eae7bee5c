"""A server with the trivial rank for soaks, and faults planted in it.

`serve FLAGS` serves; `rank FD` is its rank's process; `soak FLAGS` is the command over such a server, which
says when it has seen everything that a clean soak should.
SOAK_FAULT names a file: answers change and descriptors leak after a while, and once both were noticed, the
soak makes the file, at which the first rank dies.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import anyio
import msgspec
import numpy as np

from engine.commands import soak
from engine.config import Settings
from engine.config_sources import add_flags, resolve
from engine.launch import serve
from engine.messages import RunStep, StepDone
from engine.rank_process import run_process
from engine.soak import watch
from engine.soak.conduct import Soak
from engine.soak.options import Outcome
from tests.actors.trivial import TOKEN, OneToken, TrivialParts

FAULT = os.environ.get("SOAK_FAULT", "")
SEEN = "everything was seen"
OTHER_AT = 400
"""The step from which on answers differ."""

REST_WITHIN_S = 60.0
"""What is wrong for so long in a rest is wrong, on however busy a host."""

LEAK_FROM, LEAK_EACH = 60, 2
"""Requests before descriptors are leaked, and how often."""


class Faulty(OneToken):
    """Another token from some step on; dead once that was noticed."""

    def execute(self, job: RunStep) -> StepDone:
        done = super().execute(job)
        if os.path.exists(FAULT):
            os._exit(3)
        if job.epoch < OTHER_AT:
            return done
        sampled = len(done.token_ids) // 4
        return msgspec.structs.replace(done, token_ids=np.full(sampled, TOKEN + 1, np.int32).tobytes())


class StageParts(TrivialParts):
    """Parts of a rank, faulty or not."""

    def load(self, settings: Settings, say: Callable[[str], None]) -> OneToken:
        runner = super().load(settings, say)
        return Faulty("") if FAULT else runner


class Seeing(Soak):
    """A soak that says when it has seen everything, or has what kills the rank."""

    async def run(self) -> Outcome:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._notice)
            outcome = await super().run()
            tasks.cancel_scope.cancel()
        return outcome

    async def _notice(self) -> None:
        while not (self._noticed() if FAULT else self._seen()):
            await anyio.sleep(0.1)
        if FAULT:
            open(FAULT, "x").close()
        else:
            print(SEEN, file=sys.stderr, flush=True)

    def _noticed(self) -> bool:
        return {"seeded", "growth"} <= self.ledger.violations_by_kind.keys()

    def _seen(self) -> bool:
        ledger, kinds = self.ledger, set(self._options.kinds)
        whole = kinds <= ledger.kinds.keys() and ledger.refused_busy > 0 and ledger.left.total() > 0
        return whole and self.outcome.rests > 0 and len(self.samples.rows) >= 3


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
        soak.Soak = Seeing  # type: ignore[misc]
        if not FAULT:
            watch.REST_WITHIN_S = watch.PROBE_WITHIN_S = REST_WITHIN_S
        return soak.run(parser.parse_args(argv[1:]), (sys.executable, __file__, "serve"))
    add_flags(parser)
    if FAULT:
        leak()
    settings, _ = resolve(parser.parse_args(argv[1:]))
    settings = dataclasses.replace(settings, threads=1, dp_exchange="links", speculative_algorithm="")
    return serve(settings, (sys.executable, __file__, "rank"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
