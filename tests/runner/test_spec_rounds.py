"""Steps with speculation give the tokens of plain decoding, whatever drafts, budgets, cuts and batches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.cpu import CpuOps
from engine.messages import Sampling
from engine.model.config import ModelConfig
from engine.model.model import DeepseekV4
from engine.model.names import from_transformers
from engine.model.transformers_config import deepseek_fields
from tests.runner.spec_driver import BLOCK, GREEDY, Stream, plain_texts, prompt, scripted_driver


@pytest.fixture(scope="module")
def model(peer: Any) -> DeepseekV4:
    """The peer's model with the C kernels, whose rows don't depend on each other."""
    config = ModelConfig.from_dict(deepseek_fields(peer.config.to_dict()))
    return DeepseekV4(
        config,
        from_transformers(peer.state_dict()),
        device="cpu",
        dtype=torch.float32,
        deterministic=True,
        kv_rounding="none",
        ops=CpuOps(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_any_drafts_budgets_and_chunks_give_the_plain_text(model: DeepseekV4, seed: int) -> None:
    rng = random.Random(seed)
    driver, drafter = scripted_driver(model, ("static", "cap-accept", "compact")[seed])
    drafter.survival = lambda slot, length, place: rng.random() ** (place + 1)
    prompts = {slot: prompt(rng.choice([1, 3, 60, 125, 140]), seed * 10 + slot) for slot in range(1, 5)}
    drafter.texts = plain_texts(model, prompts, 24)
    streams = []
    for slot, ids in prompts.items():
        text = drafter.texts[slot]
        drafter.wrong |= {(slot, p) for p in range(len(ids), len(text)) if rng.random() < 0.25}
        streams.append(driver.stream(slot, ids, GREEDY, len(text) - rng.randint(0, 9)))
    emitted = set()
    while running := [stream for stream in streams if not stream.ended]:
        rng.shuffle(running)
        parts = []
        for stream in running:
            left = len(stream.prompt) - stream.planned
            parts.append((stream, min(left, rng.choice([1, 5, 64])) if left else rng.randint(1, BLOCK + 1)))
        driver.slack = rng.randint(0, 9)
        emitted |= set(driver.round(*parts, budget=rng.choice([-1, -1, 0, 1, 3, 8])).counts)
    for stream in streams:
        assert stream.prompt + stream.output == drafter.texts[stream.slot][: stream.total]
    assert len(emitted) >= BLOCK


def test_every_boundary_with_every_acceptance_gives_the_logits_of_a_fresh_forward(
    model: DeepseekV4, peer: Any
) -> None:
    # Each step of each request takes the acceptance that was seen least at its place in the c128 window.
    driver, drafter = scripted_driver(model)
    rng = random.Random(1)
    prompts = {slot: prompt(3 + slot, slot) for slot in range(1, 7)}
    drafter.texts = plain_texts(model, prompts, 760)
    sampling = Sampling(900, temperature=0.0, logprobs=0)
    streams = [driver.stream(slot, ids, sampling, len(drafter.texts[slot])) for slot, ids in prompts.items()]
    driver.round(*((stream, len(stream.prompt)) for stream in streams))
    seen: dict[tuple[int, int], int] = {}
    pairs: set[tuple[int, int, int]] = set()
    before = dict.fromkeys(prompts, 0)
    logprobs: dict[int, list[float]] = {slot: [] for slot in prompts}
    while running := [stream for stream in streams if stream.known + 6 < stream.total]:
        wanted = {}
        for stream in running:
            length = stream.known - 1
            times = [seen.get((length % 128, m), 0) for m in range(BLOCK + 1)]
            best = [m for m in range(BLOCK + 1) if times[m] == min(times)]
            fresh = [m for m in best if (length % 4, before[stream.slot], m) not in pairs]
            wanted[stream.slot] = rng.choice(fresh or best)
            drafter.wrong = {p for p in drafter.wrong if p[0] != stream.slot}
            drafter.wrong.add((stream.slot, length + 1 + wanted[stream.slot]))
        lengths = {stream.slot: stream.known - 1 for stream in running}
        done = driver.round(*((stream, BLOCK + 1) for stream in running))
        assert done.logprobs is not None
        values = iter(np.frombuffer(done.logprobs.chosen, np.float32).tolist())
        for stream, count in zip(running, done.counts, strict=True):
            slot, m = stream.slot, wanted[stream.slot]
            assert count == m + 1
            logprobs[slot] += [next(values) for _ in range(count)]
            place = lengths[slot] % 128
            seen[place, m] = seen.get((place, m), 0) + 1
            pairs.add((lengths[slot] % 4, before[slot], m))
            before[slot] = m
    assert {key[0] for key in seen} == set(range(128))
    assert len(seen) > 0.8 * 128 * (BLOCK + 1)
    assert len(pairs) == 4 * (BLOCK + 1) ** 2
    for stream in streams:
        text = stream.prompt + stream.output
        assert text == drafter.texts[stream.slot][: len(text)]
        reference = fresh_logprobs(peer, text)[len(stream.prompt) :]
        assert logprobs[stream.slot] == pytest.approx(reference.tolist(), abs=2e-4)


def fresh_logprobs(peer: Any, text: list[int]) -> torch.Tensor:
    """Log probability of each token of a text behind the first, by one pass of the peer; float32 [n - 1]."""
    with torch.no_grad():
        rows = peer(torch.tensor([text])).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]


@pytest.mark.parametrize("length", [1, 5, 127, 128, 129, 133])
def test_the_first_draft_sees_the_last_128_rows_whatever_the_chunks(model: DeepseekV4, length: int) -> None:
    ids = prompt(length, length)
    text = plain_texts(model, {1: ids}, 12)[1]
    taps = {}
    for chunk in (1000, 50):
        driver, drafter = scripted_driver(model)
        assert driver.runner.speculation is not None
        driver.runner.speculation.ring.rows.fill_(torch.nan)
        drafter.texts = {1: text}
        stream = driver.stream(1, ids, GREEDY, len(text))
        while stream.planned < length:
            driver.round((stream, min(chunk, length - stream.planned)))
        driver.round((stream, BLOCK + 1))
        assert drafter.seen == [(1, length, 0)]
        assert sorted(position for _, position in drafter.taps_seen) == list(
            range(max(0, length - 128), length)
        )
        taps[chunk] = drafter.taps_seen
        driver.finish(stream)
        assert stream.output == text[length:]
    for key, row in taps[1000].items():
        torch.testing.assert_close(taps[50][key], row, atol=1e-4, rtol=1e-4)


def test_taps_of_verified_and_of_plain_rows_are_those_of_a_prompt(model: DeepseekV4) -> None:
    text = plain_texts(model, {1: prompt(9, 9)}, 60)[1]
    driver, drafter = scripted_driver(model)
    drafter.texts = {1: text, 2: text}
    drafter.wrong = {(1, p) for p in range(12, 70, 4)}
    decoded, read = (
        driver.stream(1, text[:9], GREEDY, len(text)),
        driver.stream(2, text, GREEDY, len(text) + 9),
    )
    drafter.texts[2] = text + [0] * 9
    driver.round((decoded, 9))
    # Rows of rounds and of plain steps, injected late.
    for budget in [-1, 0, 0, 4, 0, -1, 0, 0, 0] * 2:
        driver.round((decoded, BLOCK + 1), budget=budget)
    driver.finish(decoded)
    driver.round((read, len(text)))
    drafter.texts[2] = [*text, *read.output, *[0] * 9]
    driver.round((read, BLOCK + 1))
    shared = [p for slot, p in drafter.taps_seen if slot == 1]
    assert len(shared) > 50
    for position in shared:
        own, other = drafter.taps_seen[1, position], drafter.taps_seen[2, position]
        torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_a_plainly_decoded_stretch_can_be_drafted_from(model: DeepseekV4) -> None:
    text = plain_texts(model, {1: prompt(20, 20)}, 200)[1]
    driver, drafter = scripted_driver(model)
    drafter.texts = {1: text}
    stream = driver.stream(1, text[:20], GREEDY, len(text))
    driver.round((stream, 20))
    for budget, steps in ((-1, 2), (0, 150), (-1, 1), (0, 3)):
        drafted = len(drafter.seen)
        for _ in range(steps):
            done = driver.round((stream, BLOCK + 1), budget=budget)
        assert (len(drafter.seen) - drafted, bool(done.survival)) == (
            (0, False) if not budget else (steps, True)
        )
    driver.finish(stream)
    assert stream.output == text[20:]


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 20])
def test_a_budget_is_spent_on_the_likeliest_drafts(model: DeepseekV4, budget: int) -> None:
    driver, drafter = scripted_driver(model)
    prompts = {slot: prompt(10 + slot, slot) for slot in (1, 2, 3, 4)}
    drafter.texts = plain_texts(model, prompts, 30)
    drafter.survival = lambda slot, length, place: (0.5 + slot / 10) ** (place + 1)
    streams = [driver.stream(slot, ids, GREEDY, 40) for slot, ids in prompts.items()]
    driver.round(*((stream, len(stream.prompt)) for stream in streams))
    done = driver.round(*((stream, BLOCK + 1) for stream in streams), budget=budget)
    scores = np.frombuffer(done.survival, np.float32).reshape(4, BLOCK)
    assert scores[:, 0] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert sum(done.verified) == 4 + min(budget, 20)
    taken = [score for row, rows in zip(scores, done.verified, strict=True) for score in row[: rows - 1]]
    left = [score for row, rows in zip(scores, done.verified, strict=True) for score in row[rows - 1 :]]
    assert min(taken) >= max(left, default=0)
    # Every draft is right, so each verified row emits.
    assert done.counts == done.verified


def sampled_run(model: DeepseekV4, mode: Any, budgets: list[int]) -> tuple[list[list[int]], list[bytes]]:
    """Outputs of three seeded requests, and what each step verified."""
    driver, drafter = scripted_driver(model, mode)
    drafter.samples = True
    prompts = {slot: prompt(20 * slot, slot) for slot in (1, 2, 3)}
    drafter.texts = {slot: ids + prompt(60, slot) for slot, ids in prompts.items()}
    drafter.check_anchors = False
    samplings = [
        Sampling(60, seed=5, temperature=0.9, top_p=0.9),
        Sampling(60, seed=6, temperature=0.7, frequency_penalty=0.2),
        GREEDY,
    ]
    streams: list[Stream] = [
        driver.stream(slot, ids, sampling, len(ids) + 40)
        for (slot, ids), sampling in zip(prompts.items(), samplings, strict=True)
    ]
    driver.round(*((stream, len(stream.prompt)) for stream in streams))
    verified = []
    for budget in budgets:
        left = [(stream, BLOCK + 1) for stream in streams if not stream.ended]
        verified.append(driver.round(*left, budget=budget).verified if left else b"")
    return [stream.output for stream in streams], verified


def test_the_modes_differ_in_rows_alone(model: DeepseekV4) -> None:
    cut = [3, 0, 7, 1, 12, 4, 2, -1] * 2
    assert sampled_run(model, "compact", cut) == sampled_run(model, "cap-accept", cut)
    whole = [-1] * 12
    static = sampled_run(model, "static", whole)
    assert static == sampled_run(model, "compact", whole)
    assert static == sampled_run(model, "static", [3] * 12)


def test_the_first_token_is_the_one_of_plain_decoding(model: DeepseekV4) -> None:
    sampling = Sampling(20, seed=9, temperature=1.0)
    ids = prompt(40, 4)
    text = plain_texts(model, {1: ids}, 8, sampling)[1]
    driver, drafter = scripted_driver(model)
    drafter.texts = {1: text}
    stream = driver.stream(1, ids, sampling, 60)
    driver.round((stream, 30))
    driver.round((stream, 10))
    for _ in range(7):
        driver.round((stream, 1))
    assert ids + stream.output == text
