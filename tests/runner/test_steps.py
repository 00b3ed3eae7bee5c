"""Steps give the peer's greedy tokens however they are cut, and one bad row fails alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import PageAccounting
from engine.messages import Sampling
from engine.runner.edits import MaskWords
from engine.runner.sampling import Chosen, Rows
from tests.runner.driver import Driver

GREEDY = Sampling(64, temperature=0.0)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 256, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def expected(peer: Any) -> dict[int, list[int]]:
    """Greedy continuations by the peer, of prompts named by their length."""
    texts = {}
    for length in (3, 61, 140):
        ids = torch.tensor([prompt(length, length)])
        out = peer.generate(
            ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, attention_mask=ids * 0 + 1
        )
        texts[length] = out[0, length:].tolist()
    return texts


@pytest.mark.parametrize("chunk", [1000, 50])
@pytest.mark.parametrize("length", [3, 140])
def test_greedy_steps_give_the_peers_tokens(
    driver: Driver, expected: dict[int, list[int]], length: int, chunk: int
) -> None:
    # The peer may never end a text early, so neither may we.
    sampling = Sampling(64, temperature=0.0, min_new_tokens=12)
    request = driver.request(1, prompt(length, length), sampling)
    assert driver.generate(request, 12, chunk) == expected[length]


def test_mixed_steps_of_chunks_and_decodes_give_the_same_tokens(
    driver: Driver, expected: dict[int, list[int]]
) -> None:
    sampling = Sampling(64, temperature=0.0, min_new_tokens=12)
    short, middle, long = (
        driver.request(slot, prompt(length, length), sampling) for slot, length in ((3, 3), (1, 61), (4, 140))
    )
    driver.step((short, 3))
    driver.step((long, 57), (short, 1))
    driver.step((short, 1), (middle, 61), (long, 70))
    driver.step((middle, 1), (long, 13), (short, 1))
    while len(long.output) < 12:
        driver.step(*((request, 1) for request in (middle, short, long)))
    for request, length in ((short, 3), (middle, 61), (long, 140)):
        assert request.output[:12] == expected[length]


def test_two_steps_planned_ahead_and_relayed_equal_known_tokens(
    driver: Driver, expected: dict[int, list[int]]
) -> None:
    sampling = Sampling(64, temperature=0.0, min_new_tokens=12)
    ahead = driver.request(1, prompt(61, 61), sampling)
    known = driver.request(2, prompt(61, 61), sampling)
    steps = [driver.plan([(ahead, 61)]), driver.plan([(ahead, 1)])]
    for _ in range(11):
        driver.run(steps.pop(0))
        steps.append(driver.plan([(ahead, 1)]))
    driver.run(steps.pop(0))
    driver.step((known, 61))
    for _ in range(11):
        driver.run(driver.plan([(known, 1)], relay=False))
    assert ahead.output == known.output == expected[61]


def test_a_reused_slot_knows_nothing_of_its_last_request(
    driver: Driver, expected: dict[int, list[int]]
) -> None:
    first = driver.request(
        2, prompt(140, 8), Sampling(64, seed=5, presence_penalty=1.5, logit_bias=((9, 9.0),))
    )
    driver.generate(first, 8)
    second = driver.request(2, prompt(61, 61), Sampling(64, temperature=0.0, min_new_tokens=12))
    assert driver.generate(second, 12) == expected[61]
    assert second.generation == first.generation + 1
    with pytest.raises(PageAccounting, match="generation"):
        driver.step((first, 1))


def test_seeded_texts_are_the_same_in_any_batch_and_after_a_retraction(driver: Driver) -> None:
    sampling = Sampling(64, seed=77, temperature=1.2, top_p=0.95, frequency_penalty=0.3)
    alone = driver.request(1, prompt(61, 61), sampling)
    text = driver.generate(alone, 10)
    crowded = driver.request(2, prompt(61, 61), sampling)
    others = [
        driver.request(slot, prompt(30 + slot, slot), Sampling(64, seed=slot, top_k=20)) for slot in (3, 4)
    ]
    driver.step((others[0], 33), (crowded, 40))
    driver.step((others[1], 34), (crowded, 21), (others[0], 1))
    while len(crowded.output) < 10:
        driver.step((others[0], 1), (crowded, 1), (others[1], 1))
    assert crowded.output[:10] == text
    sibling = driver.request(2, prompt(61, 61), sampling, child=1)
    assert driver.generate(sibling, 10) != text


def test_logprobs_are_of_the_raw_distribution_and_prompts_are_scored_across_chunks(
    driver: Driver, peer: Any
) -> None:
    ids = prompt(61, 61)
    sampling = Sampling(64, seed=3, temperature=0.6, presence_penalty=1.0, logprobs=2, prompt_logprobs=1)
    request = driver.request(1, ids, sampling)
    other = driver.request(2, prompt(3, 3), GREEDY)
    scored: dict[int, float] = {}
    chosen: list[float] = []
    tops: list[list[int]] = []
    for parts in ([(request, 20), (other, 3)], [(other, 1), (request, 41)], [(request, 1), (other, 1)]):
        done = driver.step(*parts)
        columns = done.logprobs
        assert columns is not None
        rows = np.frombuffer(columns.prompt_rows, np.int32).reshape(-1, 2)
        for (group, position), value in zip(
            rows, np.frombuffer(columns.prompt_chosen, np.float32), strict=True
        ):
            assert parts[group][0] is request
            scored[int(position)] = float(value)
        values = np.frombuffer(columns.chosen, np.float32)
        chosen += [float(v) for v in values if not np.isnan(v)]
        assert [count for count in columns.top_counts if count] == [2] * sum(~np.isnan(values))
        tops += np.frombuffer(columns.top_ids, np.int32).reshape(-1, 2).tolist()
    with torch.no_grad():
        reference = peer(torch.tensor([ids + request.output])).logits[0].log_softmax(-1)
    assert sorted(scored) == list(range(1, 61))
    for position, value in scored.items():
        assert value == pytest.approx(float(reference[position - 1, ids[position]]), abs=1e-4)
    for step, token in enumerate(request.output):
        row = reference[60 + step]
        assert chosen[step] == pytest.approx(float(row[token]), abs=1e-4)
        assert tops[step] == row.topk(2).indices.tolist()


def test_a_request_with_bad_parameters_fails_alone(driver: Driver, expected: dict[int, list[int]]) -> None:
    good = driver.request(1, prompt(61, 61), Sampling(64, temperature=0.0, min_new_tokens=12))
    bad = driver.request(2, prompt(61, 9), Sampling(64, logit_bias=((256, 1.0),)))
    driver.step((bad, 30), (good, 61))
    assert bad.errors == ["logit_bias names token 256, the vocabulary has 256"]
    driver.step((good, 1), (bad, 31))
    assert bad.output == []
    while len(good.output) < 12:
        driver.step((good, 1))
    assert (good.output, good.errors) == (expected[61], [])


def test_sampling_that_fails_in_company_alone_is_no_requests_fault(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other would be a slower path that nobody sees."""
    own = driver.runner.choices.sample

    def only_one(logits: Tensor, rows: Rows, mask: MaskWords | None = None) -> Chosen:
        if len(rows.slots) > 1:
            raise RuntimeError("too many rows")
        return own(logits, rows, mask)

    monkeypatch.setattr(driver.runner.choices, "sample", only_one)
    one, two = (driver.request(slot, prompt(5, slot), Sampling(64, temperature=0.0)) for slot in (1, 2))
    driver.step((one, 5))
    with pytest.raises(RuntimeError, match="too many rows"):
        driver.step((one, 1), (two, 5))


def test_a_row_whose_sampling_raises_fails_alone(driver: Driver, expected: dict[int, list[int]]) -> None:
    sampling = Sampling(64, temperature=0.0, min_new_tokens=12)
    good = driver.request(1, prompt(61, 61), sampling)
    bad = driver.request(2, prompt(61, 61), Sampling(64, logit_bias=((5, 1.0),)))
    driver.step((good, 61), (bad, 61))
    # Damage of the kind that no validation sees.
    del driver.runner.parameters.bias[2]
    driver.step((bad, 1), (good, 1))
    assert len(bad.output) == 1
    assert "sampling failed" in bad.errors[0]
    while len(good.output) < 12:
        driver.step((good, 1))
    assert good.output == expected[61]


def test_an_idle_step_answers_with_empty_columns(driver: Driver) -> None:
    done = driver.run(driver.plan([]))
    assert (done.counts, done.token_ids, done.failed, done.logprobs) == (b"", b"", (), None)
