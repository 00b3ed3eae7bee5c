"""`python -m engine bench grammar`: every answer obeys its schema, and what that costs.

64 schemas, each bounded so that its longest text fits the request's limit, are asked of one engine,
`--concurrency` requests at a time: once greedy and once sampled, and each answer must end by itself, parse,
meet its schema by an independent validator, and stay the same when it is written and read again. Then greedy
answers are timed against free text of the same prompts and lengths, interleaved; a ratio is the median of
nine pairs. Lengths are equal because both requests of a pair have the constrained answer's length as their
limit: whatever a limit saves at a text's end, such as drafts that nobody would read, both sides save. The
constrained one still ends by its grammar, whose last token is the one at the limit; free text is cut there.
With `--speculative dspark` the engine drafts, and it fails where nothing was drafted; it fails, too, where a
key was compiled twice, or not at all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import anyio
import numpy as np

from api.gate import START, gate_of
from api.grammars import constrained
from api.handle import Engine
from api.served import Served, load_served
from bench.drafting import Recorder
from bench.drafting_figures import NothingDrafted
from bench.grammar_cases import cases
from bench.grammar_figures import Answer, Asked, Pass, check_lengths, compiles, costs, masks, validity
from engine.actors.device import StepRunner
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.timers import Timers
from engine.config import Settings
from engine.errors import EngineError
from engine.grammar.gate import GatePolicy
from engine.local import engine_of, prepare_environment
from engine.messages import ABORTED, FAILED, Delta, Entry, Sampling

if TYPE_CHECKING:
    # It imports torch, before which the environment must be prepared.
    from engine.grammar.pipeline_loader import Matchers

PAIRS = 9
TEMPERATURES = (0.0, 1.0)
"""Of the answers that are validated."""


class Watched(Recorder):
    """Parts whose masks can be counted."""

    masks: Matchers

    def matchers(self, settings: Settings, runner: StepRunner, mailbox: Mailbox, timers: Timers) -> Ref:
        """As ModelParts.matchers."""
        self.masks = cast("Matchers", super().matchers(settings, runner, mailbox, timers))
        return self.masks


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures; raises Invalid, NotCompiledOnce, NothingDrafted, NothingMasked."""
    with TemporaryDirectory(prefix="grammar-bench-") as folder:
        settings = Settings(
            model_path=args.model_path,
            device=args.device,
            dtype=args.dtype,
            threads=1,
            speculative_algorithm="DSPARK" if args.speculative else "",
            speculative_verify_mode=args.verify_mode,
            grammar_cache_dir=folder,
        )
        prepare_environment(settings)
        return anyio.run(_measure, settings, args.concurrency, 3 if args.quick else PAIRS)


async def _measure(settings: Settings, concurrency: int, pairs: int) -> dict[str, Any]:
    served, parts = load_served(settings, 0), Watched()
    began_s = time.perf_counter()
    asked = await requests(served, settings)
    gate_s = time.perf_counter() - began_s
    async with engine_of(settings, served, parts, grammars=True) as engine:
        assert engine.grammars is not None
        checked = [await passed(engine, asked, concurrency, temperature) for temperature in TEMPERATURES]
        out = validity(asked, [answer for one in checked for answer in one.answers])
        out |= compiles(engine.grammars, asked)
        lengths = [answer.tokens for answer in checked[0].answers]
        await passed(engine, asked, concurrency, lengths=lengths, free=True)
        told: list[tuple[Pass, Pass]] = []
        for number in range(pairs):
            told.append(await pair(engine, asked, concurrency, lengths, number % 2 == 0))
            check_lengths(told[-1], lengths)
            print(f"pair {number + 1} of {pairs}: {told[-1][0].speed / told[-1][1].speed:.3f}", flush=True)
        out |= costs(told, engine.grammars, checked, gate_s) | masks(parts.masks.pipeline.counters)
    out |= {"concurrency": concurrency, "speculative": bool(settings.speculative_algorithm)}
    out |= {"lengths": "equal by the same limit on both sides: the constrained answer's own length"}
    if settings.speculative_algorithm and not out["draft_tokens"]:
        raise NothingDrafted(f"no token of {out['tokens']} was drafted")
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in out.items()}


async def requests(served: Served, settings: Settings) -> list[Asked]:
    """One for each schema, which the prompt shows as the model's chat format has it."""
    gate = gate_of(GatePolicy(whitespace=settings.whitespace), served.encoding, served.tokenizer)
    found = []
    for case in cases():
        wanted = {"type": "json_schema", "json_schema": {"name": "value", "schema": case.schema}}
        messages = [{"role": "user", "content": f"Give an example, number {case.number}."}]
        segments = served.encoding.segments(messages, response_format=wanted)
        wish = await gate.wish({"response_format": wanted}, root=START)
        assert wish is not None
        prompt = np.array(served.tokenizer.encode_segments(segments), np.int32)
        found.append(Asked(case, prompt.tobytes(), wish))
    return found


async def pair(
    engine: Engine, asked: Sequence[Asked], concurrency: int, lengths: Sequence[int], first: bool
) -> tuple[Pass, Pass]:
    """(constrained, free) greedy passes of the same prompts and limits. `first`: the constrained one is."""
    bound, free = (
        partial(passed, engine, asked, concurrency, lengths=lengths, free=free) for free in (False, True)
    )
    if first:
        constrained_pass = await bound()
        return constrained_pass, await free()
    free_pass = await free()
    return await bound(), free_pass


async def passed(
    engine: Engine,
    asked: Sequence[Asked],
    concurrency: int,
    temperature: float = 0.0,
    lengths: Sequence[int] | None = None,
    *,
    free: bool = False,
) -> Pass:
    """All requests, so many at a time, constrained or not.

    lengths  most tokens of each; None: as many as its schema's longest text may have
    """
    answers = [Answer() for _ in asked]
    limit = anyio.CapacityLimiter(concurrency)

    async def one(place: int) -> None:
        async with limit:
            length = asked[place].case.longest + 1 if lengths is None else lengths[place]
            await _answer(engine, asked[place], answers[place], temperature, length, free=free)

    began_s = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for place in range(len(asked)):
            tasks.start_soon(one, place)
    return Pass(answers, time.perf_counter() - began_s)


async def _answer(
    engine: Engine, asked: Asked, answer: Answer, temperature: float, length: int, *, free: bool
) -> None:
    sampling = Sampling(
        max_new_tokens=length,
        temperature=temperature,
        seed=asked.case.number,
        ignore_eos=free,
    )
    entry = Entry(sink=0, prompt=asked.prompt, sampling=sampling)
    began_s = time.perf_counter()
    async with constrained(engine.grammars, [entry], [None if free else asked.wish]) as entries:
        answer.wait_s = time.perf_counter() - began_s
        group = await engine.submit(entries)
    while deltas := await group.take():
        for delta in deltas:
            _keep(delta, answer)


def _keep(delta: Delta, answer: Answer) -> None:
    if delta.finish in (ABORTED, FAILED):
        raise EngineError(f"a request ended with {delta.finish}: {delta.message}")
    answer.text += delta.text
    answer.tokens += len(delta.token_ids)
    answer.finish = delta.finish
    answer.drafts += np.array(delta.drafts)
