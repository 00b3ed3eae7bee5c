"""`python -m engine bench device`: greedy answers on a device, recorded steps and drafts on and off.

The same prompts, one engine after the other, by Triton's kernels in bfloat16 on FP8 caches. With
`--deterministic` all answers must be the same. Without, cuts follow from a step's size, so sums are taken in
another order in a step of another size: it is told how many texts part, and by how much the best token led.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio

from api.served import load_served
from bench.drafting import Case, Diverged, Recorder, differences, lead, passed, read
from bench.drafting_figures import NothingDrafted, Pass, Side
from engine.config import Settings
from engine.errors import ConfigError
from engine.local import engine_of, prepare_environment

PROMPTS = 64
CONCURRENCY = 32
EAGER, GRAPHS = {"disable_cuda_graph": True}, {"cuda_graph_max_bs_decode": CONCURRENCY}
WAYS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "graphs": GRAPHS,
    "eager, drafts": {**EAGER, "speculative_algorithm": "DSPARK"},
    "graphs, drafts": {**GRAPHS, "speculative_algorithm": "DSPARK", "speculative_verify_mode": "static"},
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of both sorts of kernels. raises Diverged, NothingDrafted; ConfigError without a device."""
    served = Settings(
        model_path=args.model_path, device=args.device, dtype="bfloat16", max_running_requests=CONCURRENCY,
        max_total_tokens=CONCURRENCY * 1024,
    )  # fmt: skip
    if args.device != "cuda":
        raise ConfigError("takes --device cuda")
    prepare_environment(served)
    cases = read(load_served(served, 0))[: 8 if args.quick else PROMPTS]
    began = time.monotonic()
    exact = replace(served, deterministic=True)
    told = {"prompts": len(cases), "deterministic": anyio.run(compared, exact, cases)}
    if args.within_s and time.monotonic() - began > args.within_s:
        return told
    return told | {"served": anyio.run(compared, served, cases)}


async def compared(settings: Settings, cases: Sequence[Case]) -> dict[str, Any]:
    """By way, how many answers are those of the first one, and leads where the others part.

    raises  Diverged where one parts that mustn't
    """
    told: dict[str, Any] = {}
    first: Pass | None = None
    for name, changes in WAYS.items():
        began = time.perf_counter()
        one = replace(settings, **changes)
        async with engine_of(one, load_served(one, 0), parts := Recorder()) as engine:
            up = time.perf_counter()
            out = await passed(Side(one, engine, parts.steps), cases, CONCURRENCY)
            first = first or out
            leads = [await lead(engine, case) for case in differences(cases, first, out)]
        if one.speculative_algorithm and not out.drafts[2]:
            raise NothingDrafted(f"{name}: no draft was accepted")
        told[name] = {
            "same": len(cases) - len(leads), "leads": sorted(round(one, 4) for one in leads),
            "tokens": out.count, "tokens_per_s": round(out.count / out.seconds, 1),
            "start_s": round(up - began, 1), "drafts": out.drafts.tolist(),
        }  # fmt: skip
        print(name, told[name], flush=True)
        if leads and settings.deterministic:
            raise Diverged(f"{name}: {len(leads)} texts part, where the best token leads by {leads} nats")
    return told
