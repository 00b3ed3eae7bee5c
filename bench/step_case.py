"""Cases of `bench step`: a step of one kind at one size, on contexts that are there without a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.config import PAGE_TOKENS
from engine.memory.pools import KVState
from engine.messages import RunStep
from engine.model.config import KVFormat, ModelConfig
from engine.model.latent_rows import pack_rows
from engine.model.row_layout import layout_of
from engine.runner.plan import Plan, plan_step

LARGEST = 3.0
"""Of an index key's values, the largest: normal ones, 128 of them."""
VERIFIED = 6
"""Rows of a request that verifies a block of five."""
STAGGER = 37
"""Lengths of neighbouring requests differ by this, modulo 128: as many windows close as in real traffic."""


@dataclass(frozen=True)
class Case:
    """kind "decode", "verify" (six rows a request) or "prefill" (one request with all rows);

    rows     of each rank
    context  committed tokens of a request, and up to 127 more
    graph    the step is captured and replayed; else it runs eagerly
    """

    kind: str
    rows: int
    context: int
    graph: bool

    @property
    def width(self) -> int:
        """Rows of a request."""
        return {"decode": 1, "verify": VERIFIED, "prefill": self.rows}[self.kind]

    @property
    def requests(self) -> int:
        """Of each rank. Rows that don't fill a request aren't run."""
        return self.rows // self.width

    def lengths(self) -> list[int]:
        """Committed tokens of each request; whole pages before a prefill."""
        if self.kind == "prefill":
            return [self.context]
        return [self.context + STAGGER * request % 128 for request in range(self.requests)]


def cases(requests: Sequence[int], contexts: Sequence[int], chunks: Sequence[int]) -> list[Case]:
    """Decode and verify of so many requests at each context, then prompts' chunks after each context."""
    made = [
        Case(kind, count * width, context, graph=True)
        for context in contexts
        for kind, width in (("decode", 1), ("verify", VERIFIED))
        for count in requests
    ]
    return made + [Case("prefill", chunk, context, graph=False) for chunk in chunks for context in contexts]


def shortened(config: ModelConfig, layers: int) -> ModelConfig:
    """The geometry with its first `layers` layers; 0: all."""
    if not layers or layers >= config.num_hidden_layers:
        return config
    return replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=config.compress_ratios[:layers],
        num_hash_layers=min(layers, config.num_hash_layers),
        dspark=None,
    )


class Context:
    """Page numbers of one case's requests: every full page, of window pages those within reach."""

    def __init__(self, case: Case, window: int) -> None:
        entries: list[tuple[int, int, int, int]] = []
        self.full_pages = self.window_pages = 1
        for slot, length in enumerate(case.lengths(), 1):
            last = (length + case.width - 1) // PAGE_TOKENS
            first_seen = max(0, length - window + 1) // PAGE_TOKENS
            for page in range(last + 1):
                seen = page >= first_seen
                entries.append((slot, page, self.full_pages, self.window_pages if seen else 0))
                self.full_pages += 1
                self.window_pages += seen
        self.entries = np.array(entries, np.int32)
        self.slots = case.requests + 1


def filled(config: ModelConfig, case: Case, device: Any, dtype: Any, kv: KVFormat = "model") -> KVState:
    """A state whose requests have case's lengths, and random values of the right size in all pools."""
    context = Context(case, config.sliding_window)
    pages = max(2, context.full_pages), max(2, context.window_pages)
    state = KVState(config, context.slots, *pages, device, dtype, kv)
    fill(state)
    for slot in range(1, context.slots):
        state.bind(slot, 1)
    state.map_pages(context.entries)
    state.lengths[1:] = state.lengths.new_tensor(case.lengths())
    return state


def fill(state: KVState, generator: torch.Generator | None = None) -> None:
    """Random values of the right size in all pools; codes and scales are those of such values."""
    config = state.config
    for name, spec in state.specs.items():
        for pool in state.pool(name):
            # FP8 rows are made of float32 values, four times as large.
            for rows in torch.split(pool, 1 << 16):
                rows.copy_(_drawn(name, rows, config, generator))
        if spec.space != "slot" and spec.layers:
            # Row 0 of each pool is what an absent key reads.
            state.pool(name).view(torch.uint8)[:, :1] = 0
    for layer in range(config.num_hidden_layers):
        running = state.layer(layer).c128_state
        if running is not None:
            running[:, 1] = 1.0


def _drawn(
    name: str, rows: torch.Tensor, config: ModelConfig, generator: torch.Generator | None
) -> torch.Tensor:
    """What stands in these rows of a pool."""
    latents, codes = rows.dtype == torch.uint8, rows.element_size() == 1
    wide = config.head_dim if latents else rows.shape[1]
    values = torch.randn(len(rows), wide, generator=generator, device=rows.device)
    if latents:
        return pack_rows(values.bfloat16(), layout_of(wide, rows.shape[1]))
    if codes:
        return (values * (448 / LARGEST)).clamp_(-448, 448).to(rows.dtype)
    return torch.full_like(values, LARGEST / 448) if name == "index_scales" else values


def planned(state: KVState, case: Case, model: Any, ranks: int, seed: int) -> Plan:
    """The step's plan, the same sizes on every rank; a row's tokens are random."""
    requests, rows = case.requests, case.requests * case.width

    def column(values: Any) -> bytes:
        return np.asarray(values, np.int32).tobytes()

    tokens = np.random.default_rng(seed).integers(2, model.config.vocab_size, rows)
    every = case.kind != "prefill"
    step = RunStep(
        epoch=1, mode="extend" if case.kind == "prefill" else "decode", slots=column(range(1, requests + 1)),
        generations=column([1] * requests), starts=column(case.lengths()),
        counts=column([case.width] * requests), tokens=column(tokens), samples=b"\1" * requests,
        ranks=((requests, rows, rows if every else requests),) * ranks if ranks > 1 else (),
    )  # fmt: skip
    return plan_step(state, step, model, every_logit=every)
