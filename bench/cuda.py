"""`python -m engine bench cuda`: the model on an NVIDIA device against itself on the CPU, in float32.

Both run the same plain-torch code on the same weights: prompts in odd chunks, steps of several requests at
once, and decode rows across c4 and c128 boundaries. Products on the device are in full float32 (no TF32).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import PAGE_TOKENS
from engine.errors import ConfigError
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.checkpoint import load_checkpoint
from engine.model.config import ModelConfig
from engine.model.model import DeepseekV4
from engine.runner.forward import commit_step, forward
from engine.runner.plan import plan_step

REQUESTS = 4
CHUNKS = (70, 1, 129, 57, 200)
DECODES = 140
TOLERANCE = 2e-3
"""Largest difference of a logit that rounding explains: sums of products in another order, in 8 layers."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Differences of logits; raises ConfigError without a device, and where they are beyond the tolerance."""
    if not torch.cuda.is_available():
        raise ConfigError("this machine has no NVIDIA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    config, weights = load_checkpoint(args.model_path, torch.float32, torch.device("cpu"))
    outputs = {device: logits_of(config, weights, device) for device in ("cpu", "cuda")}
    differences = (outputs["cpu"] - outputs["cuda"]).abs().amax(1)
    same = (outputs["cpu"].argmax(1) == outputs["cuda"].argmax(1)).double().mean()
    figures = {
        "rows": len(differences),
        "max_difference": float(differences.max()),
        "median_difference": float(differences.median()),
        "tolerance": TOLERANCE,
        "logit_std": float(outputs["cpu"].std()),
        "same_argmax": float(same),
    }
    if figures["max_difference"] > TOLERANCE:
        raise ConfigError(f"logits differ beyond {TOLERANCE}: {figures}")
    return figures


def logits_of(config: ModelConfig, weights: Mapping[str, Tensor], device: str) -> Tensor:
    """[rows, V] of all steps, on the CPU."""
    model = DeepseekV4(
        config, weights, device=device, dtype=torch.float32, deterministic=False, kv_rounding="none"
    )
    pages = 1 + REQUESTS * (1 + (sum(CHUNKS) + DECODES) // PAGE_TOKENS)
    state = KVState(config, REQUESTS + 1, pages, pages, device, torch.float32)
    for slot in range(1, REQUESTS + 1):
        state.bind(slot, 1)
    state.map_pages(page_table(pages))
    rows = []
    for step in steps(config.vocab_size):
        plan = plan_step(state, step, model, every_logit=True)
        out = forward(model, state, plan)
        commit_step(model, state, plan, out.pending)
        rows.append(out.logits.cpu())
    return torch.cat(rows)


def page_table(pages: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Every page of every request, ids dealt out in turn, window ids from the other end."""
    ids = range(1, pages)
    rows = [(1 + i % REQUESTS, i // REQUESTS, page, pages - page) for i, page in enumerate(ids)]
    return np.array(rows, dtype=np.int32)


def steps(vocab_size: int) -> Iterator[RunStep]:
    """Chunks of all requests together, each request's shifted by one place, then decode rows."""
    lengths = [0] * REQUESTS
    random = np.random.default_rng(5)
    for number in range(len(CHUNKS) + DECODES):
        counts = [CHUNKS[(number + i) % len(CHUNKS)] if number < len(CHUNKS) else 1 for i in range(REQUESTS)]
        yield run_step(number, lengths, counts, random.integers(3, vocab_size, sum(counts)))
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]


def run_step(epoch: int, starts: Sequence[int], counts: Sequence[int], tokens: Any) -> RunStep:
    """One step of all requests."""

    def column(values: Any) -> bytes:
        return np.asarray(values, np.int32).tobytes()

    return RunStep(
        epoch=epoch,
        mode="mixed",
        slots=column(range(1, REQUESTS + 1)),
        generations=column([1] * REQUESTS),
        starts=column(starts),
        counts=column(counts),
        tokens=column(tokens),
        samples=b"\1" * REQUESTS,
    )
