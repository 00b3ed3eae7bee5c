"""Steps with speculation give the tokens of plain decoding, whatever the drafts, budgets and batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.memory.pools import KVState
from engine.messages import Sampling
from engine.model.model import DeepseekV4
from engine.runner.speculative import Speculation, VerifyMode
from engine.runner.step import StepRunner
from tests.runner.driver import Driver
from tests.runner.scripted_drafter import ScriptedDrafter
from tests.runner.spec_driver import SpecDriver, Stream

BLOCK, SLOTS, PAGES = 5, 7, 60
TAPS = (1, 3, 4)
CPU = torch.device("cpu")
GREEDY = Sampling(400, temperature=0.0)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 256, (length,), generator=generator).tolist()


def spec_driver(model: DeepseekV4, mode: VerifyMode = "compact") -> tuple[SpecDriver, ScriptedDrafter]:
    """A runner that drafts by script."""
    state = KVState(model.config, SLOTS, PAGES, PAGES, CPU, torch.float32)
    drafter = ScriptedDrafter(BLOCK, TAPS)
    return SpecDriver(StepRunner(model, state, (1,), Speculation(drafter, state, mode))), drafter


def plain_text(model: DeepseekV4, ids: list[int], sampling: Sampling, tokens: int) -> list[int]:
    """Prompt and what plain decoding, one request alone, makes of it."""
    state = KVState(model.config, 2, 9, 9, CPU, torch.float32)
    driver = Driver(StepRunner(model, state, (1,)))
    return ids + driver.generate(driver.request(1, ids, sampling), tokens)


@pytest.mark.parametrize("seed", range(4))
def test_any_drafts_budgets_and_chunks_give_the_plain_text(model: DeepseekV4, seed: int) -> None:
    rng = random.Random(seed)
    driver, drafter = spec_driver(model, rng.choice(["static", "cap-accept", "compact"]))
    drafter.survival = lambda slot, length, place: rng.random() ** (place + 1)
    streams: list[Stream] = []
    for slot in range(1, 5):
        ids, total = prompt(rng.choice([1, 3, 60, 125, 140]), seed * 10 + slot), rng.randint(8, 30)
        text = plain_text(model, ids, GREEDY, total)
        drafter.texts[slot] = text
        wrong = [p for p in range(len(ids), len(text)) if rng.random() < 0.3]
        drafter.wrong |= {(slot, p) for p in wrong}
        streams.append(driver.stream(slot, ids, GREEDY, len(text)))
    emitted = set()
    while not all(stream.ended for stream in streams):
        parts = []
        for stream in rng.sample(
            [s for s in streams if not s.ended],
            k=rng.randint(1, 4) if False else len([s for s in streams if not s.ended]),
        ):
            left = len(stream.prompt) - stream.planned
            parts.append((stream, min(left, rng.choice([1, 5, 64])) if left else rng.randint(1, 6)))
        driver.slack = rng.randint(0, 9)
        done = driver.round(*parts, budget=rng.choice([-1, 0, 1, 3, 8]))
        emitted |= set(done.counts)
    for stream in streams:
        assert stream.prompt + stream.output == drafter.texts[stream.slot]
    assert max(emitted) >= 4
