"""Before anything is timed: kernels against plain torch with the same roundings, ranks against one alone.

A few layers of the geometry, of every ratio, on one random state. First every operation of a forward on the
same inputs; then whole forwards, row by row: the norm of the difference over the norm of what is right, of
logits and of what the compressors get. There, roundings add up: one bit of a bfloat16 turns an FP8 code, and
a near-tie an expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench.step_case import Case, filled, planned, shortened
from bench.step_compared import ComparedOps
from engine.cache_format import cache_format
from engine.config import Settings
from engine.errors import EngineError
from engine.kernel_sets import operations
from engine.model.config import ModelConfig
from engine.model.groups import ALONE, Groups
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.step import StepOutput
from engine.rank_weights import rank_weights
from engine.runner.forward import commit_step, forward

LAYERS = 5
CASE = Case("verify", 12, 3000, graph=False)
OPERATION = 1.5e-2
"""Of one operation: two roundings to bfloat16, and FP8 codes that exp's last bit turns, or the matrix unit,
which keeps some 14 bits of a sum of FP8 products. With experts of few channels a code is much: 0.010 was
seen."""
NEAR, FAR, FAR_SHARE = 0.3, 0.8, 0.25
"""Of whole forwards: the median row; from where a row is far; and how many may be. Three layers of random
weights were seen to add up to 0.06 and 0.34; rows that have nothing to do with each other are 1.4 apart."""


class Differs(EngineError):
    """Two ways of the same forward gave other numbers."""


def parity(settings: Settings, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Distances by what was compared. raises Differs"""
    config = shortened(ModelConfig.from_json(settings.model_path), LAYERS)
    dtype = getattr(torch, settings.dtype)
    kv = cache_format(settings, config)
    state, rank = filled(config, CASE, device, dtype, kv), groups.dp.rank

    def built(own: Groups) -> DeepseekV4:
        ops = operations(settings)
        with rank_weights(settings, config, own, print, keeps=ops.keeps) as weights:
            return DeepseekV4(
                config, weights, device=device, dtype=dtype, deterministic=False, kv_rounding="none", ops=ops,
                groups=own,
            )  # fmt: skip

    def run(model: DeepseekV4) -> StepOutput:
        return forward(model, state, planned(state, CASE, model, model.groups.dp.size, rank))

    def commit(model: DeepseekV4, out: StepOutput) -> None:
        commit_step(model, state, planned(state, CASE, model, 1, rank), out.pending)

    alone, told = built(ALONE), {}
    if groups.dp.size > 1:
        told["ranks_against_one"] = judged(run(built(groups)), run(alone))
    if alone.ops.keeps:
        told |= against_oracle(alone, run, commit)
    return told


def against_oracle(
    model: DeepseekV4,
    run: Callable[[DeepseekV4], StepOutput],
    commit: Callable[[DeepseekV4, StepOutput], None],
) -> dict[str, Any]:
    """Distances of the model's kernels from their oracle; the state is another one then. raises Differs"""
    from engine.kernels.triton.oracle_ops import OracleOps

    kernels, out = model.ops, run(model)
    kernels.check()
    compared = ComparedOps(kernels, OracleOps())
    run(with_operations(model, compared))
    right = run(with_operations(model, OracleOps()))
    commit(with_operations(model, compared), right)
    kernels.check()
    with_operations(model, kernels)
    if wrong := {name: apart for name, apart in compared.worst.items() if not apart <= OPERATION}:
        raise Differs(f"operations beyond {OPERATION}: {wrong}; all: {compared.worst}")
    return {"operations": compared.worst, "kernels_against_oracle": judged(out, right)}


def with_operations(model: DeepseekV4, ops: TorchOps) -> DeepseekV4:
    """The model, now on these operations."""
    model.ops = ops
    for layer in model.layers:
        layer.ops = ops
    return model


def judged(out: StepOutput, right: StepOutput) -> dict[str, float]:
    """Median and largest distance, and the share of rows that are far. raises Differs"""
    apart = rows_apart(out, right)
    figures = {
        "median": statistics.median(apart),
        "largest": max(apart),
        "far": sum(not row <= FAR for row in apart) / len(apart),
    }
    # Not `>`: a distance that is no number is one.
    if not (figures["median"] <= NEAR and figures["far"] <= FAR_SHARE):
        raise Differs(f"{figures} of {len(apart)} rows")
    return figures


def rows_apart(out: StepOutput, right: StepOutput) -> list[float]:
    """Distance of each row of the logits, and of each layer's compressor inputs."""
    pairs = [
        (out.logits, right.logits),
        (out.pending.c4, right.pending.c4),
        (out.pending.c128, right.pending.c128),
    ]
    found: list[float] = []
    for own, wanted in pairs:
        own, wanted = own.flatten(0, -2).double(), wanted.flatten(0, -2).double()
        found += ((own - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-30)).tolist()
    return found
