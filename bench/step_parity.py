"""Before anything is timed: kernels against plain torch with the same roundings, ranks against one alone.

A few layers of the geometry, of every ratio, on one random state. Row by row the distance is the norm of the
difference over the norm of what is right, of logits and of what the compressors get. A row far off met a
near-tie of router or indexer; most rows must be near.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from bench.step_case import Case, filled, planned, shortened
from engine.config import Settings
from engine.errors import EngineError
from engine.kernel_sets import operations
from engine.model.config import ModelConfig
from engine.model.groups import ALONE, Groups
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.step import StepOutput
from engine.rank_weights import rank_weights
from engine.runner.forward import forward

LAYERS = 5
CASE = Case("verify", 12, 3000, graph=False)
NEAR, FAR, FAR_SHARE = 0.03, 0.3, 0.1
"""What roundings to bfloat16 and FP8 add up to in a few layers, at the median; from where a row is far; and
how many may be."""


class Differs(EngineError):
    """Two ways of the same forward gave other numbers."""


def parity(settings: Settings, groups: Groups, device: torch.device) -> dict[str, Any]:
    """Distances by what was compared. raises Differs"""
    config = shortened(ModelConfig.from_json(settings.model_path), LAYERS)
    dtype = getattr(torch, settings.dtype)
    state = filled(config, CASE, device, dtype)

    def out_of(ops: TorchOps, own: Groups) -> StepOutput:
        with rank_weights(settings, config, own, print, keeps=ops.keeps) as weights:
            model = DeepseekV4(
                config, weights, device=device, dtype=dtype, deterministic=False, kv_rounding="none", ops=ops,
                groups=own,
            )  # fmt: skip
        return forward(model, state, planned(state, CASE, model, own.dp.size, groups.dp.rank))

    alone, told = out_of(operations(settings), ALONE), {}
    if operations(settings).keeps:
        from engine.kernels.triton.oracle import OracleOps

        told["kernels_against_oracle"] = judged(alone, out_of(OracleOps(), ALONE))
    if groups.dp.size > 1:
        told["ranks_against_one"] = judged(out_of(operations(settings), groups), alone)
    return told


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
