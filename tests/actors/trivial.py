"""A server whose rank has no model: the real scheduler, links and HTTP, and a runner that knows one token.

`python tests/actors/trivial.py serve PORT MODEL DRAIN_S` serves; `rank FD` is its rank's process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

import engine.front
import engine.launch
import engine.lifecycle_watch
from engine.actors.core import Core
from engine.actors.detok import Detok
from engine.actors.intake import RankSetup
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.no_matchers import NoMatchers
from engine.actors.rank import Rank
from engine.actors.timers import Timers
from engine.config import Settings
from engine.errors import CheckpointError
from engine.launch import serve
from engine.messages import RunStep, StepDone, StepOut
from engine.rank_parts import ModelParts
from engine.rank_process import run_process

TOKEN = 300
STEP_S = 0.005
FAULT = os.environ.get("TRIVIAL_FAULT", "")
"""What goes wrong: `load`, `slow load`; `break`, `hang`, `slow` from step 10 on; `detok` after ten chunks."""
GATE = os.environ.get("TRIVIAL_GATE", "")
"""A file without which step 10 isn't answered."""
WHEN = os.environ.get("TRIVIAL_FAULT_WHEN", "")
"""A file: a step goes wrong once it is there, instead of from step 10 on."""
FAULT_AT = 10
FAULT_RANK = int(os.environ.get("TRIVIAL_FAULT_RANK", "0"))
SLOW_S = 0.05
WATCHDOG_S = float(os.environ.get("TRIVIAL_WATCHDOG_S", "60"))
HANG_S = float(os.environ.get("TRIVIAL_HANG_S", WATCHDOG_S))
"""The same for the rank that something goes wrong in: it notices a device that hangs before its peer does."""
SLOTS, QUEUED = 8, 16


class OneToken:
    """Answers every sampled row with one token after 5 ms; goes wrong as the environment says."""

    def __init__(self, fault: str = FAULT) -> None:
        self._fault = fault

    def execute(self, job: RunStep) -> StepDone:
        time.sleep(STEP_S)
        begun = os.path.exists(WHEN) if WHEN else job.epoch >= FAULT_AT
        fault = self._fault if begun else ""
        while GATE and job.epoch >= FAULT_AT and not os.path.exists(GATE):
            time.sleep(STEP_S)
        if fault == "break":
            raise RuntimeError("an illegal address was encountered")
        if fault in ("hang", "slow"):
            time.sleep(60 if fault == "hang" else SLOW_S)
        sampled = int(np.frombuffer(job.samples, np.uint8).sum())
        return StepDone(job.epoch, job.samples, np.full(sampled, TOKEN, np.int32).tobytes())


class TrivialParts(ModelParts):
    """Parts of a rank without a model."""

    def load(self, settings: Settings, say: Callable[[str], None]) -> OneToken:
        say("nothing to load")
        if self._rank != FAULT_RANK:
            return OneToken("")
        if FAULT == "load":
            raise CheckpointError("layers.0.attn.wq_a.weight is missing")
        if FAULT == "slow load":
            time.sleep(60)
        return OneToken()

    def matchers(self, settings: Settings, runner: object, mailbox: Mailbox, timers: Timers) -> Ref:
        # As ModelParts for a runner without grammars, which imports torch to see that: two seconds a rank.
        return NoMatchers(mailbox.tell_first)

    def core(self, settings: Settings, rank: int, runner: object) -> Core:
        watchdog_s = HANG_S if rank == FAULT_RANK else WATCHDOG_S
        return Rank(
            RankSetup(
                rank=rank, ranks=settings.dp_size, slots=SLOTS, queued=QUEUED, chunk_tokens=256,
                context_tokens=8192, window_tokens=128, full_pages=300, window_pages=40, eos_ids=(1,),
                watchdog_ms=int(watchdog_s * 1000),
            )
        )  # fmt: skip


class FailingDetok(Detok):
    """A detokenizer that fails at its tenth step."""

    steps = 0

    def emit_step(self, msg: StepOut) -> None:
        self.steps += 1
        if self.steps == FAULT_AT:
            raise ValueError("a planted fault")
        super().emit_step(msg)


def main(argv: list[str]) -> int:
    """Serves, or runs the rank."""
    if argv[0] == "rank":
        run_process(int(argv[1]), TrivialParts())
    if FAULT == "detok":
        engine.front.Detok = FailingDetok
    engine.launch.STOP_S = float(os.environ.get("TRIVIAL_STOP_S", "60"))
    engine.lifecycle_watch.LEAST_S = float(
        os.environ.get("TRIVIAL_SILENCE_S", engine.lifecycle_watch.LEAST_S)
    )
    settings = Settings(
        port=int(argv[1]),
        model_path=argv[2],
        drain_s=float(argv[3]),
        threads=1,
        watchdog_s=WATCHDOG_S,
        grammar_cache_dir="none",
        dp_size=int(os.environ.get("TRIVIAL_DP", "1")),
        dp_exchange=os.environ.get("TRIVIAL_EXCHANGE", "links"),
    )
    return serve(settings, (sys.executable, __file__, "rank"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
