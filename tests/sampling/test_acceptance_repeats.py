"""A request that gave its seed gets the tokens of plain decoding, whatever is drafted and verified."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.messages import Sampling, SlotBind
from engine.runner.acceptance import Acceptance
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.parameters import SlotParameters
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Rows, Sampler

VOCAB, GAMMA, SLOTS, PROMPT = 64, 4, 9, 5


def bound(**changes: float) -> tuple[SlotParameters, TokenCounts]:
    """Slots 1 to 8 with seeds of their clients."""
    device = torch.device("cpu")
    parameters = SlotParameters(SLOTS, VOCAB, (1,), device)
    counts = TokenCounts(SLOTS, VOCAB, device)
    for slot in range(1, SLOTS):
        sampling = Sampling(max_new_tokens=64, seed=slot * 77, seeded=True, **changes)
        parameters.bind(SlotBind(slot, 0, slot, 0, sampling, PROMPT))
        if parameters.of(slot).penalised:
            counts.bind(slot, np.arange(PROMPT, dtype=np.int32).tobytes(), PROMPT)
    return parameters, counts


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.9, "frequency_penalty": 1.5},
    ],
)
def test_accepted_tokens_are_those_that_the_plain_sampler_draws(changes: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(3)
    slots = tuple(range(1, SLOTS))
    some_accepted = 0
    for trial in range(20):
        logits = torch.randn(len(slots), GAMMA + 1, VOCAB, generator=generator) * 2
        noisy = logits[:, :GAMMA] + 0.3 * torch.randn(len(slots), GAMMA, VOCAB, generator=generator)
        parameters, counts = bound(**changes)
        first = PROMPT + trial
        choose = Acceptance(parameters, counts).choose(slots, (first,) * len(slots))
        drafts = torch.stack([choose(k, noisy[:, k]) for k in range(GAMMA)], 1)
        widths = np.array([1 + (trial + slot) % (GAMMA + 1) for slot in slots])
        rows = VerifyRows(slots, (first,) * len(slots), widths, drafts, noisy)
        flat = torch.cat([logits[g, :width] for g, width in enumerate(widths)])
        accepted = Acceptance(parameters, counts).accept(flat, rows)
        assert accepted.valid.all()
        some_accepted += int((accepted.counts - 1).sum())
        plain, plain_counts = bound(**changes)
        sampler = Sampler(plain, plain_counts)
        for g, slot in enumerate(slots):
            count = int(accepted.counts[g])
            drawn = [
                int(sampler.sample(logits[g, i : i + 1], Rows((slot,), (first + i,))).tokens[0])
                for i in range(count)
            ]
            assert accepted.tokens[g, :count].tolist() == drawn
            # The run goes on exactly as long as drafts are the drawn tokens and rows are left to judge them.
            assert drawn[:-1] == drafts[g, : count - 1].tolist()
            assert count == widths[g] or drawn[-1] != int(drafts[g, count - 1])
    # Drafts are drawn in the same way: far more of them are accepted than by chance.
    assert some_accepted > 20 * len(slots) // 2
