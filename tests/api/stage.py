"""A whole engine in one process for API tests: real cores and shells, and a device that follows a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import httpx
import numpy as np
from anyio.abc import TaskGroup

from api.app import App, create_app
from api.checks import Bounds
from api.handle import Edge, Engine
from api.served import Served
from engine.actors.ask import Asks
from engine.actors.core import Core
from engine.actors.detok import Detok
from engine.actors.ingress import Ingress
from engine.actors.intake import RankSetup
from engine.actors.mailbox import Mailbox
from engine.actors.rank import Rank
from engine.actors.shell import Shell
from engine.actors.timers import Timers
from engine.config import NANO, Settings
from engine.grammar.service import GrammarService
from engine.messages import (
    LogprobColumns,
    RankUp,
    RunStep,
    SlotBind,
    StepDone,
    Tick,
)
from engine.metrics import Metrics
from engine.model.encoding import load_encoding
from engine.model.tokenizer import Tokenizer, load_tokenizer

EOS = 1
CONTEXT = 512
NAME = "nano"
TOKENIZER = load_tokenizer(NANO)
ENCODING = load_encoding(NANO)

CALL = (
    "Wait.\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">two</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)
RANK = {
    "model_name": "nano",
    "engine_type": "unified",
    "dp_rank": "0",
    "tp_rank": "0",
    "pp_rank": "0",
    "moe_ep_rank": "0",
}
Script = Callable[[SlotBind, int], int]
"""(what the request wants, place of the token in its output) -> token id."""


def says(text: str, tokenizer: Tokenizer = TOKENIZER) -> Script:
    """Every request is answered with this text and EOS; special tokens in it count as such."""
    return says_ids([*tokenizer.encode(text), EOS])


def says_ids(ids: Sequence[int]) -> Script:
    """Every request is answered with these tokens, the last one for ever."""
    return lambda bind, place: ids[min(place, len(ids) - 1)]


class ScriptedDevice:
    """Answers steps by a script: a token is a function of its request and place alone."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.binds: dict[int, SlotBind] = {}
        self.fails: dict[int, str] = {}
        self.steps: list[RunStep] = []

    def execute(self, job: RunStep) -> StepDone:
        """The step's tokens and, where one asked, log probabilities that tell the token's place."""
        self.steps.append(job)
        self.binds |= {bind.slot: bind for bind in job.binds}
        slots, starts, counts = (
            np.frombuffer(x, np.int32).tolist() for x in (job.slots, job.starts, job.counts)
        )
        sampled: list[int] = []
        tokens: list[int] = []
        failed: list[tuple[int, str]] = []
        echoes: list[tuple[int, int]] = []
        for row, (slot, start, count, samples) in enumerate(
            zip(slots, starts, counts, job.samples, strict=True)
        ):
            bind = self.binds[slot]
            if bind.sampling.prompt_logprobs >= 0:
                echoes += [(row, at) for at in range(max(start, 1), min(start + count, bind.prompt_tokens))]
            if bind.request_id in self.fails:
                failed.append((row, self.fails[bind.request_id]))
                sampled.append(0)
                continue
            sampled.append(samples)
            if samples:
                tokens.append(self.script(bind, start + count - bind.prompt_tokens))
        wants = any(self.binds[slot].sampling.logprobs >= 0 for slot in slots)
        columns = logprob_columns(tokens, echoes) if wants else None
        ids = np.array(tokens, np.int32).tobytes()
        return StepDone(job.epoch, bytes(sampled), ids, tuple(failed), columns)


def logprob_columns(tokens: Sequence[int], echoes: Sequence[tuple[int, int]]) -> LogprobColumns:
    """Chosen -0.5 with the tops (token, 2); prompt tokens minus their position."""
    n = len(tokens)
    tops = np.array([[token, 2] for token in tokens], np.int32)
    return LogprobColumns(
        chosen=np.full(n, -0.5, np.float32).tobytes(),
        top_counts=bytes([2] * n),
        top_ids=tops.tobytes(),
        top_values=np.tile(np.array([-0.5, -1.5], np.float32), n).tobytes(),
        prompt_rows=np.array(echoes, np.int32).reshape(-1, 2).tobytes(),
        prompt_chosen=np.array([-position for _, position in echoes], np.float32).tobytes(),
        prompt_top_counts=bytes(len(echoes)),
    )


class SteadyHealth:
    """Answers of the probes, set by the test."""

    def __init__(self) -> None:
        self.why = ""
        self.fresh = True

    async def refusal(self) -> str:
        return self.why

    async def report(self) -> tuple[bool, dict[str, Any]]:
        return self.fresh, {"status": "ok" if self.fresh else "stale", "ranks": []}


class Stage:
    """The running engine and its HTTP side."""

    def __init__(
        self,
        tasks: TaskGroup,
        script: Script,
        settings: Settings,
        health: Any,
        model: Served,
        grammars: GrammarService | None = None,
    ) -> None:
        self.device = ScriptedDevice(script)
        self.settings = settings
        self.health = health
        self.step_s = 0.0
        self.gate: anyio.Event | None = None
        self._tasks = tasks
        self._timers = Timers()
        tasks.start_soon(self._timers.run)
        self.asks = Asks()
        self.metrics = Metrics("sglang:", NAME, 1, CONTEXT, ("/v1/models",))
        self.ingress = self._mailbox("ingress")
        self.detok = self._mailbox("detok")
        self.rank = self._mailbox("rank0")
        self.edge = Edge(self.ingress, self.metrics.snapshot)
        self.refs: dict[str, Any] = {
            "ingress": self.ingress,
            "detok": self.detok,
            "rank0": self.rank,
            "api": self.edge,
            "shutdown": self._mailbox("shutdown"),
        }
        self._jobs: list[RunStep] = []
        self._job_came = anyio.Event()
        self.cores: dict[str, Core] = {}
        limit = settings.max_running_requests + settings.max_queued_requests
        self._start(self.ingress, Ingress(1, limit))
        self._start(self.detok, Detok(TOKENIZER, settings.stream_buffer))
        self._start(self.rank, Rank(rank_setup(settings)), self._submit)
        tasks.start_soon(self._run_jobs)
        self.engine = Engine(self.asks, self.ingress, self.detok, self.edge, grammars=grammars)
        self.metrics.grammars.service = grammars
        self.app: App = create_app(
            self.engine, model, self.metrics, self.health, settings, draw_seed=lambda: 7
        )

    def _mailbox(self, name: str) -> Mailbox:
        return Mailbox(name, 4096, "reject")

    def _start(self, mailbox: Mailbox, core: Core, submit: Callable[[Any], None] | None = None) -> None:
        self.cores[mailbox.name] = core
        self._tasks.start_soon(Shell(core, mailbox, self.refs, self._timers, self.asks, any_send, submit).run)

    def _submit(self, job: RunStep) -> None:
        self._jobs.append(job)
        self._job_came.set()

    async def _run_jobs(self) -> None:
        while True:
            while self._jobs:
                if self.gate is not None:
                    await self.gate.wait()
                await anyio.sleep(self.step_s)
                self.rank.tell(self.device.execute(self._jobs.pop(0)))
            self._job_came = anyio.Event()
            await self._job_came.wait()

    @property
    def live(self) -> int:
        """Requests without a terminal event."""
        core = self.cores["ingress"]
        assert isinstance(core, Ingress)
        return len(core.live)

    async def settled(self, requests: int = 0) -> None:
        """Returns once this many requests are left."""
        with anyio.fail_after(60):
            while self.live != requests:
                await anyio.sleep(0.001)

    async def snapshot(self) -> None:
        """A fresh snapshot of the rank has reached the metrics."""
        self.rank.tell(Tick(0.0, 1.0))
        await anyio.wait_all_tasks_blocked()

    def client(self, **more: Any) -> httpx.AsyncClient:
        """An HTTP client of the app, in process."""
        transport = httpx.ASGITransport(app=self.app)  # type: ignore[arg-type]
        return httpx.AsyncClient(transport=transport, base_url="http://engine", **more)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """One POST with a JSON body."""
        async with self.client() as client:
            return await client.post(path, json=body, **more)


def any_send(to: str, kind: type) -> bool:
    """The wiring has its own tests."""
    return True


def rank_setup(settings: Settings) -> RankSetup:
    """A rank with room for a dozen requests."""
    return RankSetup(
        rank=0,
        ranks=1,
        slots=settings.max_running_requests,
        queued=settings.max_queued_requests,
        chunk_tokens=64,
        context_tokens=CONTEXT,
        window_tokens=128,
        full_pages=200,
        window_pages=300,
        eos_ids=(EOS,),
        watchdog_ms=60_000,
    )


def served(settings: Settings) -> Served:
    """The shipped tokenizer and chat format with a short context."""
    bounds = Bounds(
        vocab_size=TOKENIZER.vocab_size,
        context_length=CONTEXT,
        max_n=settings.max_n,
        max_group=settings.max_queued_requests,
        max_top_logprobs=settings.max_top_logprobs,
        temperature=1.0,
        top_p=1.0,
    )
    return Served(NAME, TOKENIZER, ENCODING, bounds, 1_700_000_000, frozenset({"overlap"}))


@asynccontextmanager
async def stage(
    script: Script,
    health: Any = None,
    modes: frozenset[str] = frozenset({"overlap"}),
    grammars: GrammarService | None = None,
    **flags: Any,
) -> AsyncIterator[Stage]:
    """A running engine with this script; ends with nothing left behind."""
    async with anyio.create_task_group() as tasks:
        settings = Settings(**flags)
        model = replace(served(settings), modes=modes)
        made = Stage(tasks, script, settings, health or SteadyHealth(), model, grammars)
        made.ingress.tell(RankUp(0))
        yield made
        tasks.cancel_scope.cancel()
