"""`python -m engine bench lossless`: greedy text with drafts is that of plain decoding, token for token.

An engine without drafts answers every prompt. Then engines with drafts answer shares of the
prompts: in every verify mode, under several batch mixes, chunk sizes and blocks, and with caches so small
that requests are retracted and computed anew. Kernels are row-invariant, so every token must be the same. It
fails where one differs, where a setting has no draft accepted, and where no request was retracted.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from api.handle import Engine
from api.served import load_served
from bench.drafting import Diverged, Recorder
from bench.drafting_figures import NothingDrafted
from bench.lossless_cases import Case, Setting, read, settings_list
from engine.actors.capacity import CostTable, Curve
from engine.actors.core import Core
from engine.actors.device import StepRunner
from engine.actors.rank import Rank
from engine.config import Settings
from engine.errors import EngineError
from engine.local import engine_of, prepare_environment
from engine.messages import ABORTED, FAILED, Entry, Sampling

COSTS = CostTable(0.010, Curve([1], [0.0]), Curve([1, 64], [0.0, 0.063]), Curve([1], [0.002]))
"""A machine on which a drafted row costs about as much as it is worth: budgets of every size come up."""

ARRIVALS_S = 0.03
"""From one request to the next at the beginning, so that prompts are read while others decode."""

PLAIN = 8
"""Requests at a time without drafts: one alone would give the same, more slowly."""

SMALL = "small cache"


class Kept(Recorder):
    """Parts of a rank that keep its scheduler, too."""

    rank: Rank

    def core(self, settings: Settings, rank: int, runner: StepRunner) -> Core:
        """As ModelParts.core."""
        made = super().core(settings, rank, runner)
        assert isinstance(made, Rank)
        self.rank = made
        return made


@dataclass
class Run:
    """What one engine made of some prompts.

    retracted    requests that gave their pages back
    steps        with decode rows; `mixed` of them read prompts, too
    rounds       of one request each, in steps that drafted; `drafts` drafted tokens that they verified,
                 `accepted` of those, `trimmed` drafted tokens that they left out
    """

    tokens: list[list[int]]
    seconds: float = 0.0
    retracted: int = 0
    steps: int = 0
    mixed: int = 0
    rounds: int = 0
    drafts: int = 0
    accepted: int = 0
    trimmed: int = 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Counts by setting and in all; raises Diverged, NothingDrafted."""
    settings = Settings(
        model_path=args.model_path,
        threads=1,
        deterministic=True,
        max_running_requests=32,
        max_total_tokens=32_768,
    )
    prepare_environment(settings)
    cases = read(load_served(settings, 0), 40 if args.quick else args.prompts)
    return compare(settings, settings_list(), cases, args.tokens)


def compare(
    settings: Settings, plan: Sequence[Setting], cases: Sequence[Case], tokens: int
) -> dict[str, Any]:
    """Runs the plan against plain decoding.

    settings  of the plain engine; those with drafts differ by their setting's changes
    tokens    of each answer, at most
    """
    began_s = time.perf_counter()
    expected = anyio.run(_answers, settings, cases, tokens, PLAIN)
    print(f"without drafts: {sum(map(len, expected.tokens))} tokens, {expected.seconds:.1f} s", flush=True)
    figures: dict[str, Any] = {
        "prompts": len(cases),
        "prompt_tokens": sum(len(case.ids) // 4 for case in cases),
        "kinds": len({case.kind for case in cases}),
        "tokens": sum(map(len, expected.tokens)),
    }
    settled = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in plan:
            settled[one.name] = check(settings, one, cases, expected, tokens, Path(folder))
    names = ("tokens", "retracted", "rounds", "drafts", "accepted", "trimmed", "mixed_steps", "mismatches")
    figures["compared"] = {name: sum(one[name] for one in settled.values()) for name in ("prompts", *names)}
    if any(SMALL in one.name for one in plan) and not figures["compared"]["retracted"]:
        raise EngineError("no request was retracted: the caches are large enough for all that run")
    return figures | {"settings": settled, "seconds": round(time.perf_counter() - began_s, 1)}


def check(
    settings: Settings, one: Setting, cases: Sequence[Case], expected: Run, tokens: int, folder: Path
) -> dict[str, Any]:
    """Counts of one setting. raises Diverged, NothingDrafted"""
    changed = replace(settings, speculative_algorithm="DSPARK", **one.changes)
    if not one.measured:
        changed = replace(changed, speculative_cost_table=_table(changed, folder))
    start, step = one.share
    share = slice(start, None, step)
    found = anyio.run(_answers, changed, cases[share], tokens, one.concurrency)
    pairs = list(zip(found.tokens, expected.tokens[share], strict=True))
    wrong = [place for place, (mine, other) in enumerate(pairs) if mine != other]
    counts = {
        "prompts": len(pairs),
        "tokens": sum(map(len, found.tokens)),
        "retracted": found.retracted,
        "steps": found.steps,
        "mixed_steps": found.mixed,
        "rounds": found.rounds,
        "drafts": found.drafts,
        "accepted": found.accepted,
        "trimmed": found.trimmed,
        "mismatches": len(wrong),
        "seconds": round(found.seconds, 1),
    }
    print(f"{one.name}: {', '.join(f'{name} {count}' for name, count in counts.items())}", flush=True)
    if wrong:
        mine, other = pairs[wrong[0]]
        at = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), -1)
        raise Diverged(
            f"{one.name}: {len(wrong)} of {len(pairs)} answers differ; prompt {start + step * wrong[0]} has "
            f"{len(mine)} tokens, not {len(other)}, and differs at token {at}"
        )
    if not found.accepted:
        raise NothingDrafted(f"{one.name}: {found.drafts} drafted tokens were verified, none was accepted")
    return counts


def _table(settings: Settings, folder: Path) -> str:
    """A file with COSTS that the engine of these settings takes for its own."""
    import torch

    from engine.cost_table import key_of, save

    torch.set_num_threads(settings.threads)
    block = settings.speculative_num_draft_tokens or _block(settings)
    path = folder / f"{settings.speculative_verify_mode}-{block}.json"
    save(path, key_of(settings, block), COSTS, [])
    return str(path)


def _block(settings: Settings) -> int:
    from engine.model.config import ModelConfig

    dspark = ModelConfig.from_json(settings.model_path).dspark
    if dspark is None:
        raise NothingDrafted(f"{settings.model_path} has no DSpark draft")
    return dspark.block_size


async def _answers(settings: Settings, cases: Sequence[Case], tokens: int, concurrency: int) -> Run:
    parts = Kept()
    out = Run([[] for _ in cases])
    limit = anyio.CapacityLimiter(concurrency)
    async with engine_of(settings, load_served(settings, 0), parts) as engine:
        began_s = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for place, case in enumerate(cases):
                wait_s = ARRIVALS_S * (place % concurrency)
                tasks.start_soon(_one, engine, case, out.tokens[place], tokens, limit, wait_s)
        out.seconds = time.perf_counter() - began_s
    _count(out, parts)
    return out


async def _one(
    engine: Engine,
    case: Case,
    into: list[int],
    tokens: int,
    limit: anyio.CapacityLimiter,
    wait_s: float,
) -> None:
    sampling = Sampling(max_new_tokens=tokens, temperature=0.0, ignore_eos=case.ignore_eos)
    async with limit:
        await anyio.sleep(wait_s)
        group = await engine.submit([Entry(sink=0, prompt=case.ids, sampling=sampling)])
        while deltas := await group.take():
            for delta in deltas:
                into += delta.token_ids
                if delta.finish in (ABORTED, FAILED):
                    raise EngineError(f"a request ended with {delta.finish}: {delta.message}")


def _count(out: Run, parts: Kept) -> None:
    """From the results of the steps, and from the scheduler."""
    out.retracted = parts.rank.planner.retracted[0]
    for done in (done for done in parts.steps if done.verified):
        rows = [
            (verified, count) for verified, count in zip(done.verified, done.counts, strict=True) if verified
        ]
        out.steps += bool(rows)
        out.mixed += 0 < len(rows) < len(done.verified)
        if not done.survival:
            continue
        verified = sum(one - 1 for one, _ in rows)
        out.rounds += len(rows)
        out.drafts += verified
        out.accepted += sum(count - 1 for _, count in rows if count)
        out.trimmed += len(rows) * (len(done.survival) // 4 // len(done.verified)) - verified
