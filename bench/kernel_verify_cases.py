"""Cases of `bench kernels`: verification of drafts, from logits to what is emitted."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bench.kernel_cases import Case
from bench.kernel_sampling_cases import COMPARED, VOCABULARY, falling, slots_of
from engine.kernels.triton import accept
from engine.messages import Sampling
from engine.runner.acceptance import Acceptance
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.penalties import TokenCounts

GAMMA = 5
SAMPLINGS = {
    "greedy": Sampling(64, temperature=0.0),
    "whole": Sampling(64),
    "top-p 0.95": Sampling(64, top_p=0.95),
}


def verify_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Groups of six rows each. The target's logits are read once, the drafts' where one is rejected."""
    for rows in row_counts:
        groups = max(1, rows // (GAMMA + 1))
        target, ids, near = drafted(groups)
        for name, sampling in SAMPLINGS.items():
            parameters = slots_of(sampling, groups)
            repeats = torch.zeros(groups + 1, dtype=torch.uint8, device="cuda")
            slots = torch.arange(1, groups + 1, device="cuda")
            lens = torch.full_like(slots, GAMMA + 1)
            stats = accept.draft_stats(near, slots, parameters.floats)
            dense = None if name == "greedy" else near
            drafts = accept.Drafts(slots, 7 * slots, lens, ids, dense, None if dense is None else stats)
            given = (parameters.floats, parameters.ints, repeats)
            out = accept.accept(target, drafts, *given)
            some = min(groups, COMPARED)
            numbers = tuple(range(1, some + 1))
            verify = VerifyRows(
                numbers, tuple(7 * n for n in numbers), np.full(some, GAMMA + 1, np.int64), ids[:some],
                None if dense is None else dense[:some],
            )  # fmt: skip
            counts = TokenCounts(1, 1, target.device)
            wanted = Acceptance(parameters, counts).accept(target[: some * (GAMMA + 1)], verify)
            wrong = float((out.tokens[:some] != wanted.tokens).any(1).sum())
            calls = [lambda d=drafts, g=given, t=target: accept.accept(t, d, *g)] * 4
            cut = float((out.counts <= GAMMA).sum()) if dense is not None else 0.0
            size = 4.0 * VOCABULARY * (len(target) + 2 * cut)
            shape = f"{groups} groups, [{len(target)}, {VOCABULARY}]"
            yield Case(f"accept {name}", shape, len(target), calls, size, 0, "bf16", "", [], wrong, 0.0)


def drafted(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits [6 B, V], draft ids [B, 5], and logits [B, 5, V] near the target's."""
    target = falling(groups * (GAMMA + 1), 2.0)
    near = target.view(groups, GAMMA + 1, VOCABULARY)[:, :GAMMA] + 0.5 * torch.randn(
        groups, GAMMA, VOCABULARY, device="cuda"
    )
    ids = (near + torch.empty_like(near).exponential_().log_().neg_()).argmax(2)
    return target, ids, near.contiguous()
