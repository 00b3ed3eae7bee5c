"""`python -m engine bench offline --speculative both`: the engine with drafts against itself without them.

Two engines of the same settings but for the drafts run the same prompts of bench/prompts.jsonl, interleaved,
greedy, `--concurrency` requests at a time, and must give the same tokens but for near ties where kernels
aren't row-invariant, or the benchmark fails; it fails, too, where nothing was drafted. A ratio is the median
of nine pairs; a pair takes a share of the prompts of every kind, and more than fill the requests at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from api.handle import Engine
from api.served import Served, load_served
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

LEAST_PROMPTS = 2
"""Prompts of each kind in a pair, at least."""


class NothingDrafted(EngineError):
    """The path that the benchmark is about did not run."""


class Diverged(EngineError):
    """Greedy output with drafts isn't that of plain decoding."""


@dataclass(frozen=True)
class Case:
    """One prompt: its kind, its token ids."""

    kind: str
    ids: bytes


@dataclass(frozen=True)
class Side:
    """One engine, and the results of its steps."""

    engine: Engine
    steps: list[StepDone]


@dataclass
class Pass:
    """What one engine made of one share.

    by_kind  seconds, of requests that ran alone
    drafts   rounds, drafted tokens verified, accepted
    """

    tokens: list[list[int]]
    seconds: float
    by_kind: dict[str, float]
    drafts: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Tokens given out."""
        return sum(map(len, self.tokens))


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
    settings = Settings(model_path=args.model_path, device=args.device, dtype=args.dtype, threads=1)
    drafting = replace(settings, speculative_algorithm="DSPARK", speculative_verify_mode=args.verify_mode)
    prepare_environment(settings)
    cases = read(load_served(settings, 0))
    return anyio.run(_measure, settings, drafting, cases, args.concurrency, 3 if args.quick else PAIRS)


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
    settings: Settings, drafting: Settings, cases: list[Case], concurrency: int, pairs: int
) -> dict[str, Any]:
    sides = []
    async with AsyncExitStack() as stack:
        for one in (settings, drafting):
            parts = Recorder()
            engine = await stack.enter_async_context(engine_of(one, load_served(one, 0), parts))
            sides.append(Side(engine, parts.steps))
        plan = shares(cases, pairs, concurrency)
        for side in sides:
            await passed(side, plan[0], concurrency)
            side.steps.clear()
        told: list[tuple[Pass, Pass]] = []
        ties: list[float] = []
        for number, share in enumerate(plan):
            # Who is first is not always the same one.
            order = sides if number % 2 else sides[::-1]
            found = {id(side): await passed(side, share, concurrency) for side in order}
            plain, drafted = found[id(sides[0])], found[id(sides[1])]
            for differing in differences(share, plain, drafted):
                ties.append(await explained(sides[0].engine, differing))
            told.append((plain, drafted))
            print(
                f"pair {number + 1} of {pairs}: {plain.seconds / drafted.seconds:.3f} "
                f"({plain.count / plain.seconds:.0f} tokens/s plain)",
                flush=True,
            )
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
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))
            yield Case(case.kind, case.ids + np.array(mine[:same], np.int32).tobytes())


async def explained(engine: Engine, case: Case) -> float:
    """How far apart the two best tokens are there, in nats. raises Diverged where that is no near tie."""
    sampling = Sampling(max_new_tokens=1, temperature=0.0, logprobs=2, ignore_eos=True)
    group = await engine.submit([Entry(sink=0, prompt=case.ids, sampling=sampling)])
    top: list[float] = []
    while deltas := await group.take():
        top += [value for delta in deltas for row in delta.logprobs for _, value in row.top]
    margin = top[0] - top[1]
    print(f"a {case.kind} prompt differs where the two best are {margin:.1e} nats apart", flush=True)
    if margin >= NEAR_TIE:
        raise Diverged(f"a {case.kind} prompt: another token where the best one leads by {margin:.1e} nats")
    return margin


def figures(told: Sequence[tuple[Pass, Pass]], sides: Sequence[Side], concurrency: int) -> dict[str, Any]:
    """From all pairs. raises NothingDrafted."""
    drafts = sum((drafted.drafts for _, drafted in told), np.zeros(3, np.int64))
    steps = sides[1].steps
    drafting = [done for done in steps if done.survival]
    if not drafting:
        raise NothingDrafted(f"no step of {len(steps)} drafted anything")
    ratios = [plain.seconds / drafted.seconds for plain, drafted in told]
    low, middle, high = statistics.quantiles(ratios, n=4)
    count = sum(plain.count for plain, _ in told)
    out = {
        "concurrency": concurrency,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "tokens": count,
        "plain_tokens_per_s": count / sum(plain.seconds for plain, _ in told),
        "drafted_tokens_per_s": count / sum(drafted.seconds for _, drafted in told),
        "drafting_share": len(drafting) / len(steps),
        "draft_tokens": int(drafts[1]),
        "accept_rate": float(drafts[2] / max(drafts[1], 1)),
        "accept_length": 1 + float(drafts[2] / max(drafts[0], 1)),
        **{f"ratio_{kind}": _ratio_of(told, kind) for kind in told[0][0].by_kind},
        **costs(sides),
    }
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in out.items()}


def _ratio_of(told: Sequence[tuple[Pass, Pass]], kind: str) -> float:
    return statistics.median(plain.by_kind[kind] / drafted.by_kind[kind] for plain, drafted in told)


def costs(sides: Sequence[Side]) -> dict[str, float]:
    """What a full verification and a draft of one request take, over a plain step of one request."""
    plain = [done.seconds for done in sides[0].steps if len(done.counts) == 1 and done.counts[0] == 1]
    alone = [done for done in sides[1].steps if len(done.counts) == 1 and done.survival]
    most = max((done.verified[0] for done in alone), default=0)
    full = [done for done in alone if done.verified[0] == most]
    if not plain or not full:
        return {}
    step_s = statistics.median(plain)
    return {
        "plain_step_ms": step_s * 1e3,
        "verify_rows": most,
        "verify_over_plain": statistics.median(done.phases[1] for done in full) / step_s,
        "draft_over_plain": statistics.median(done.phases[0] for done in full) / step_s,
        "accept_over_plain": statistics.median(done.phases[2] for done in full) / step_s,
    }
