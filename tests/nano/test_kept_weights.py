"""The shipped model on its weights as they are stored says what it says in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.config import NANO, Settings
from engine.kernels.cpu import CpuOps
from engine.kernels.triton.oracle_ops import OracleOps
from engine.memory.pages import pages_for
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import KVFormat, ModelConfig
from engine.model.groups import ALONE
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.tokenizer import load_tokenizer
from engine.rank_weights import rank_weights
from engine.runner.forward import forward
from engine.runner.plan import plan_step

TEXT = "The capital of France is Paris. Water boils at one hundred degrees, and freezes at zero. " * 8


def log_odds(ops: TorchOps, dtype: str, ids: list[int], kv: KVFormat = "model") -> Tensor:
    config, own = ModelConfig.from_json(NANO), getattr(torch, dtype)
    with rank_weights(Settings(dtype=dtype), config, ALONE, lambda line: None, keeps=ops.keeps) as weights:
        model = DeepseekV4(
            config, weights, device="cpu", dtype=own, deterministic=False, kv_rounding="none", ops=ops
        )
    pages = pages_for(len(ids))
    state = KVState(config, 2, 1 + pages, 1 + pages, "cpu", own, kv)
    state.bind(1, 1)
    state.map_pages(np.array([[1, page, page + 1, page + 1] for page in range(pages)], np.int32))

    def column(*numbers: int) -> bytes:
        return np.array(numbers, np.int32).tobytes()

    step = RunStep(
        epoch=1, mode="extend", slots=column(1), generations=column(1), starts=column(0),
        counts=column(len(ids)), tokens=column(*ids), samples=b"\1",
    )  # fmt: skip
    return forward(model, state, plan_step(state, step, model, every_logit=True)).logits.log_softmax(1)


def test_fp8_and_fp4_weights_with_fp8_activations_tell_the_same_story() -> None:
    """With the roundings of the kernels on a device, by plain torch; FP8, FP4 and bfloat16 in one."""
    ids = load_tokenizer(NANO).encode(TEXT)[:160]
    wide, kept = log_odds(CpuOps(), "float32", ids), log_odds(OracleOps(), "bfloat16", ids)
    following = torch.tensor(ids[1:])
    losses = [-odds[:-1].gather(1, following.unsqueeze(1)).mean() for odds in (wide, kept)]
    assert abs(float(losses[0] - losses[1])) < 0.05
    assert float((wide.exp() * (wide - kept)).sum(1).mean()) < 0.02
    assert float((wide.argmax(1) == kept.argmax(1)).float().mean()) > 0.9


def test_fp8_caches_tell_the_same_story() -> None:
    """Latents and index keys in FP8, nothing else rounded; long enough that c4 layers select."""
    ids = load_tokenizer(NANO).encode(TEXT * 3)[:400]
    wide, coded = log_odds(CpuOps(), "float32", ids), log_odds(TorchOps(), "float32", ids, "fp8")
    assert float((wide.exp() * (wide - coded)).sum(1).mean()) < 0.002
    assert float((wide.argmax(1) == coded.argmax(1)).float().mean()) > 0.95
