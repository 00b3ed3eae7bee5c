"""`python -m engine bench offline --speculative both`: the engine with drafts against itself without them.

Two engines of the same settings but for the drafts run the same prompts of bench/prompts.jsonl, interleaved,
greedy, `--concurrency` requests at a time, and must give the same tokens but for near ties where kernels
aren't row-invariant, or the benchmark fails; it fails, too, where nothing was drafted. A ratio is the median
of nine pairs; a pair takes a share of the prompts of every kind, and more than fill the requests at a time.
With several requests at a time an engine that verifies every draft in full (mode static) takes part in each
pair, for what the scheduling of drafts is worth, and for how well the drafts know what becomes of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from api.handle import Engine
from api.served import Served, load_served
from bench.drafting_figures import Pass, Side, figures
from engine.actors.device import Device, StepRunner
from engine.actors.timers import Timers
from engine.config import Settings
from engine.errors import EngineError
from engine.local import engine_of, prepare_environment
from engine.messages import ABORTED, FAILED, Delta, Entry, Sampling, StepDone
from engine.rank_parts import ModelParts

PROMPTS = Path(__file__).with_name("prompts.jsonl")
PAIRS = 9
NEW_TOKENS = 96
NEAR_TIE = 1e-4
"""Nats: where sums are taken in another order, two tokens that are closer may change places."""

LEAST_SLOTS, MOST_TOKENS = 8, 1024
"""Caches of up to three engines are as large as the prompts need."""

LEAST_PROMPTS = 2
"""Prompts of each kind in a pair, at least."""


class Diverged(EngineError):
    """Greedy output with drafts isn't that of plain decoding."""


@dataclass(frozen=True)
class Case:
    """One prompt: its kind, its token ids."""

    kind: str
    ids: bytes


class Recorder(ModelParts):
    """Parts of a rank that keep the results of every step."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []

    def device(
        self, load: Callable[[], StepRunner], deliver: Callable[[StepDone], None], timers: Timers
    ) -> Device:
        """As ModelParts.device."""

        def kept(done: StepDone) -> None:
            self.steps.append(done)
            deliver(done)

        return super().device(load, kept, timers)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures; raises Diverged, NothingDrafted."""
    settings = Settings(
        model_path=args.model_path,
        device=args.device,
        dtype=args.dtype,
        threads=1,
        max_running_requests=max(args.concurrency, LEAST_SLOTS),
        max_total_tokens=max(args.concurrency, LEAST_SLOTS) * MOST_TOKENS,
    )
    modes = [args.verify_mode]
    if args.concurrency > 1 and args.verify_mode != "static":
        modes.append("static")
    drafting = [
        replace(settings, speculative_algorithm="DSPARK", speculative_verify_mode=mode) for mode in modes
    ]
    prepare_environment(settings)
    cases = read(load_served(settings, 0))
    plan = shares(cases, 3 if args.quick else PAIRS, args.concurrency)
    return anyio.run(_measure, [settings, *drafting], plan, args.concurrency)


def read(served: Served) -> list[Case]:
    """The committed prompts, as ids."""
    cases = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "messages" in row:
            segments = served.encoding.segments(row["messages"], thinking=row["thinking"])
            ids = served.tokenizer.encode_segments(segments)
        else:
            ids = served.tokenizer.encode_plain(row["prompt"])
        cases.append(Case(row["kind"], np.array(ids, np.int32).tobytes()))
    return cases


def shares(cases: Sequence[Case], pairs: int, concurrency: int) -> list[list[Case]]:
    """What each pair runs: equally many of every kind, one kind after the other in turns."""
    kinds = list(dict.fromkeys(case.kind for case in cases))
    by_kind = {kind: [case for case in cases if case.kind == kind] for kind in kinds}
    each = max(LEAST_PROMPTS, -(-2 * concurrency // len(kinds)))
    found = []
    for pair in range(pairs):
        start = pair * each
        found.append([by_kind[k][(start + i) % len(by_kind[k])] for i in range(each) for k in kinds])
    return found


async def _measure(
    settings: Sequence[Settings], plan: Sequence[Sequence[Case]], concurrency: int
) -> dict[str, Any]:
    sides = []
    async with AsyncExitStack() as stack:
        for one in settings:
            parts = Recorder()
            engine = await stack.enter_async_context(engine_of(one, load_served(one, 0), parts))
            sides.append(Side(one, engine, parts.steps))
        for side in sides:
            await passed(side, plan[0], concurrency)
            side.steps.clear()
        told: list[list[Pass]] = []
        ties: list[float] = []
        for number, share in enumerate(plan):
            # Who is first is not always the same one.
            turn = number % len(sides)
            found = {
                id(side): await passed(side, share, concurrency) for side in [*sides[turn:], *sides[:turn]]
            }
            passes = [found[id(side)] for side in sides]
            for other in passes[1:]:
                for differing in differences(share, passes[0], other):
                    ties.append(await explained(sides[0].engine, differing))
            told.append(passes)
            ratios = ", ".join(f"{passes[0].seconds / one.seconds:.3f}" for one in passes[1:])
            rate = passes[0].count / passes[0].seconds
            print(f"pair {number + 1} of {len(plan)}: {ratios} ({rate:.0f} tokens/s plain)", flush=True)
    return figures(told, sides, concurrency) | {"identical": not ties, "near_ties": len(ties)}


async def passed(side: Side, share: Sequence[Case], concurrency: int) -> Pass:
    """Runs a share, so many requests at a time."""
    out = Pass([[] for _ in share], 0.0, {}, np.zeros(3, np.int64))
    limit = anyio.CapacityLimiter(concurrency)
    begin = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for place, case in enumerate(share):
            tasks.start_soon(_one, side.engine, case, out, place, limit)
    out.seconds = time.perf_counter() - begin
    return out


async def _one(engine: Engine, case: Case, out: Pass, place: int, limit: anyio.CapacityLimiter) -> None:
    async with limit:
        begin = time.perf_counter()
        sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
        group = await engine.submit([Entry(sink=0, prompt=case.ids, sampling=sampling)])
        while deltas := await group.take():
            for delta in deltas:
                _keep(delta, out, place)
        if limit.total_tokens == 1:
            out.by_kind[case.kind] = out.by_kind.get(case.kind, 0.0) + time.perf_counter() - begin


def _keep(delta: Delta, out: Pass, place: int) -> None:
    out.tokens[place] += delta.token_ids
    if delta.finish in (ABORTED, FAILED):
        raise EngineError(f"a request ended with {delta.finish}: {delta.message}")
    out.drafts += delta.drafts


def differences(share: Sequence[Case], plain: Pass, drafted: Pass) -> Iterator[Case]:
    """Of each answer that differs: what came before the first difference, as a prompt."""
    for case, mine, other in zip(share, plain.tokens, drafted.tokens, strict=True):
        if mine != other:
            same = mine[: common(mine, other)]
            yield Case(case.kind, case.ids + np.array(same, np.int32).tobytes())


def common(mine: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))


async def explained(engine: Engine, case: Case) -> float:
    """How far apart the two best tokens are there, in nats. raises Diverged where that is no near tie."""
    margin = await lead(engine, case)
    print(f"a {case.kind} prompt differs where the two best are {margin:.1e} nats apart", flush=True)
    if margin >= NEAR_TIE:
        raise Diverged(f"a {case.kind} prompt: another token where the best one leads by {margin:.1e} nats")
    return margin


async def lead(engine: Engine, case: Case) -> float:
    """Nats by which the best token behind the prompt leads the next one."""
    sampling = Sampling(max_new_tokens=1, temperature=0.0, logprobs=2, ignore_eos=True)
    group = await engine.submit([Entry(sink=0, prompt=case.ids, sampling=sampling)])
    top: list[float] = []
    while deltas := await group.take():
        top += [value for delta in deltas for row in delta.logprobs for _, value in row.top]
    return top[0] - top[1]
