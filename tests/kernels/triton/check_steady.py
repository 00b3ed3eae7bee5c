"""Cuts that never change: a row has the same bits alone, beside others, and verified behind others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.step_case import fill
from engine.config import Settings
from engine.errors import ConfigError
from engine.kernel_sets import operations
from engine.kernels.triton_steady import SteadyOps
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import KVFormat, ModelConfig
from engine.model.dummy import DummyWeights
from engine.model.expert_weights import ExpertWeights
from engine.model.layout import DEEPSEEK_LAYOUT
from engine.model.model import DeepseekV4
from engine.runner.forward import commit_step, forward
from engine.runner.plan import plan_step
from tests.kernels.triton.cases import DEVICE
from tests.kernels.triton.check_ops import BF16, FIELDS, state

CONFIG = ModelConfig.from_dict(
    {**FIELDS, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0}
)
TOKENS = np.random.default_rng(5).integers(2, 256, (3, 256))
"""By slot and position."""
MANY = 5 if DEVICE == "cpu" else 40
"""Rows of one request: on a device more than one tile of any kernel."""


def model() -> DeepseekV4:
    weights = DummyWeights(CONFIG, BF16, torch.device(DEVICE), seed=3, layout=DEEPSEEK_LAYOUT)
    return DeepseekV4(
        CONFIG, weights, device=DEVICE, dtype=BF16, deterministic=True, kv_rounding="none",
        ops=SteadyOps(torch.device(DEVICE)),
    )  # fmt: skip


def filled(kv: KVFormat) -> KVState:
    """Random caches, the same each time."""
    made = state(CONFIG, kv)
    fill(made, torch.Generator(DEVICE).manual_seed(1))
    return made


def run(kernels: DeepseekV4, held: KVState, rows: Sequence[tuple[int, int, int]], keep: bool) -> Tensor:
    """Logits of all rows of a step of (slot, first position, rows).

    keep  the step is committed
    """
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tokens = np.concatenate([TOKENS[slot, start : start + count] for slot, start, count in rows]).astype(
        np.int32
    )
    step = RunStep(
        1, "mixed", slots.tobytes(), np.ones_like(slots).tobytes(), starts.tobytes(), counts.tobytes(),
        tokens.tobytes(), b"\1" * len(rows),
    )  # fmt: skip
    plan = plan_step(held, step, kernels, every_logit=True)
    out = forward(kernels, held, plan)
    if keep:
        commit_step(kernels, held, plan, out.pending)
    kernels.ops.check()
    return out.logits


@pytest.mark.parametrize("kv", ["fp8"] if DEVICE == "cpu" else ["model", "fp8"])
def test_a_row_has_its_bits_whatever_runs_beside_it(kv: KVFormat) -> None:
    kernels, held = model(), filled(kv)
    together = run(kernels, held, [(1, 126, 2), (2, 71, MANY)], keep=False)
    alone = run(kernels, held, [(1, 126, 2)], keep=False), run(kernels, held, [(2, 71, MANY)], keep=False)
    assert torch.equal(together, torch.cat(alone))
    assert bool(together.isfinite().all())


@pytest.mark.parametrize("kv", ["fp8"] if DEVICE == "cpu" else ["model", "fp8"])
def test_rows_that_are_verified_have_the_bits_of_those_decoded_one_by_one(kv: KVFormat) -> None:
    """Over the end of a c4 and of a c128 window."""
    kernels, held = model(), filled(kv)
    verified = run(kernels, held, [(1, 126, 4)], keep=False)
    decoded = [run(kernels, held, [(1, 126 + place, 1)], keep=True) for place in range(4)]
    assert torch.equal(verified, torch.cat(decoded))


def test_the_settings_choose_them_and_experts_must_be_in_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.triton_ops.check_device", lambda device, dtype: None)
    chosen = operations(Settings(kernels="triton", dtype="bfloat16", device=DEVICE, deterministic=True))
    assert isinstance(chosen, SteadyOps)
    kernels = model()
    layer = kernels.layers[0].weights.moe
    x = torch.zeros(1, 256, dtype=BF16, device=DEVICE)
    ids, weights = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.ones(1, 2, device=DEVICE)
    floats = replace(layer, routed=ExpertWeights(x, x))
    with pytest.raises(ConfigError, match="takes experts in FP4"):
        chosen.experts(x, ids, weights, floats, 10.0)
