"""Slots under speculation: ends, reuse, retraction, failures of one request, steps planned ahead."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import PageAccounting, ShapeMismatch
from engine.messages import Sampling, SlotBind
from engine.model.draft import Choose
from engine.model.model import DeepseekV4
from engine.runner.columns import Int
from engine.runner.edits import MaskWords
from engine.runner.masking import MaskGroups, Masks
from tests.runner.scripted_drafter import ScriptedDrafter
from tests.runner.spec_driver import BLOCK, GREEDY, SpecDriver, plain_texts, prompt, scripted_driver

WIDTH = BLOCK + 1


@pytest.fixture(scope="module")
def texts(model: DeepseekV4) -> dict[int, list[int]]:
    """Greedy texts by slot, 40 tokens behind prompts of 30, 31 and 32."""
    return plain_texts(model, {slot: prompt(29 + slot, slot) for slot in (1, 2, 3)}, 40)


def started(
    model: DeepseekV4, texts: dict[int, list[int]], *slots: int
) -> tuple[SpecDriver, ScriptedDrafter]:
    driver, drafter = scripted_driver(model)
    drafter.texts = {slot: texts[slot] for slot in slots}
    return driver, drafter


@pytest.mark.parametrize("left", range(1, 9))
def test_no_row_is_verified_behind_a_requests_end(
    model: DeepseekV4, texts: dict[int, list[int]], left: int
) -> None:
    driver, _ = started(model, texts, 1)
    stream = driver.stream(1, texts[1][:30], GREEDY, 31 + left)
    driver.round((stream, 30))
    ahead = [driver.plan_round([(stream, WIDTH)]) for _ in range(3)]
    rows = [driver.run(step).verified[0] for step in ahead]
    assert rows == [min(left, WIDTH), max(left - WIDTH, 0), 0]
    assert stream.output == texts[1][30 : 31 + left]


def test_a_request_that_had_ended_answers_with_nothing_and_changes_nobody(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, drafter = started(model, texts, 1, 2, 3)
    short = driver.stream(1, texts[1][:30], GREEDY, 33)
    long = driver.stream(2, texts[2][:31], GREEDY, 60)
    late = driver.stream(3, texts[3][:32], GREEDY, 60)
    driver.round((short, 30), (long, 31))
    steps = [
        driver.plan_round([(short, WIDTH), (long, 3)]),
        driver.plan_round([(late, 20), (short, WIDTH), (long, 4)]),
        driver.plan_round([(short, WIDTH)]),
    ]
    assert bytes(driver.run(steps[0]).verified) == bytes([2, 3])
    done = driver.run(steps[1])
    assert (done.verified, done.counts) == (bytes([0, 0, 4]), bytes([0, 0, 4]))
    assert np.frombuffer(done.lengths, np.int32).tolist() == [20, 32, 31 + 3 + 4]
    done = driver.run(steps[2])
    assert (done.counts, done.token_ids, done.verified, done.survival) == (b"\0", b"", b"\0", b"")
    driver.round((late, 12), (long, WIDTH))
    driver.finish(long, late)
    for stream in (long, late):
        text = stream.prompt + stream.output
        assert text == texts[stream.slot][:60]
    assert {slot for slot, length, _ in drafter.seen if length >= 32} == {2, 3}


def test_steps_planned_ahead_use_the_lengths_of_the_device(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, drafter = started(model, texts, 1, 2)
    drafter.wrong = {(1, 35), (2, 33), (2, 41)}
    one, two = (driver.stream(slot, texts[slot][: 29 + slot], GREEDY, 66) for slot in (1, 2))
    steps = [driver.plan_round([(one, 30), (two, 31)])]
    while not (one.ended and two.ended):
        steps.append(driver.plan_round([(one, WIDTH), (two, WIDTH)]))
        driver.run(steps.pop(0))
    for step in steps:
        assert sum(driver.run(step).counts) == 0
    assert (one.prompt + one.output, two.prompt + two.output) == (texts[1][:66], texts[2][:66])


def test_anchors_may_be_told_by_the_host(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, _ = started(model, texts, 1)
    stream = driver.stream(1, texts[1][:30], GREEDY, 60)
    driver.round((stream, 30))
    while not stream.ended:
        driver.run(driver.plan_round([(stream, WIDTH)], relay=False))
    assert stream.prompt + stream.output == texts[1][:60]


def test_a_reused_slot_drafts_from_its_own_rows_and_refuses_the_old_request(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, drafter = started(model, texts, 1)
    old = driver.stream(1, texts[1][:30], GREEDY, 70)
    driver.round((old, 30))
    for _ in range(3):
        driver.round((old, WIDTH))
    drafter.texts[1] = texts[2]
    young = driver.stream(1, texts[2][:31], GREEDY, 60)
    # A step of the old request is planned before the host knows that its slot is another's.
    stale = driver.plan_round([(old, WIDTH)])
    drafter.taps_seen.clear()
    driver.round((young, 31))
    with pytest.raises(PageAccounting, match="slot 1 is at generation 2"):
        driver.runner.execute(stale.step)
    driver, drafter = started(model, texts, 1)
    drafter.texts[1] = texts[1]
    old = driver.stream(1, texts[1][:30], GREEDY, 70)
    driver.round((old, 30))
    driver.round((old, WIDTH))
    drafter.texts[1] = texts[2]
    young = driver.stream(1, texts[2][:31], GREEDY, 60)
    driver.round((young, 31))
    driver.finish(young)
    assert young.prompt + young.output == texts[2][:60]
    assert (1, 31, 0) in drafter.seen


def test_a_retracted_request_goes_on_with_its_output_as_prompt(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, drafter = started(model, texts, 1)
    first = driver.stream(1, texts[1][:30], GREEDY, 66)
    driver.round((first, 30))
    for _ in range(2):
        driver.round((first, WIDTH))
    known = first.prompt + first.output
    drafter.texts[2] = texts[1]
    again = driver.stream(2, known, GREEDY, 66, own_prompt=30)
    driver.round((again, 25))
    driver.round((again, len(known) - 25))
    driver.finish(again)
    assert again.prompt + again.output == texts[1][:66]
    assert min(length for slot, length, _ in drafter.seen if slot == 2) == len(known)


def test_a_draft_with_nan_verifies_its_anchor_alone(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, drafter = started(model, texts, 1, 2)
    drafter.broken = {1}
    one, two = (driver.stream(slot, texts[slot][: 29 + slot], GREEDY, 60) for slot in (1, 2))
    driver.round((one, 30), (two, 31))
    done = driver.round((one, WIDTH), (two, WIDTH))
    assert done.verified == bytes([1, WIDTH])
    assert np.frombuffer(done.survival, np.float32)[:BLOCK].tolist() == [0.0] * BLOCK
    driver.finish(one, two)
    assert (one.prompt + one.output, two.prompt + two.output) == (texts[1][:60], texts[2][:60])


def test_bad_logits_fail_their_request_alone(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, _ = started(model, texts, 1, 2)
    bad = driver.stream(1, texts[1][:30], Sampling(64, temperature=0.0, logit_bias=((5, 0.0),)), 60)
    good = driver.stream(2, texts[2][:31], GREEDY, 60)
    driver.round((bad, 30), (good, 31))
    ids, values = driver.runner.parameters.bias[1]
    driver.runner.parameters.bias[1] = (ids, values * torch.nan)
    done = driver.round((bad, WIDTH), (good, WIDTH))
    assert "NaN" in bad.errors[0]
    assert done.counts == bytes([0, WIDTH])
    assert np.frombuffer(done.lengths, np.int32)[0] == 30
    driver.finish(good)
    assert good.prompt + good.output == texts[2][:60]


def test_damaged_parameters_fail_their_request_alone(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, _ = started(model, texts, 1, 2)
    bad = driver.stream(1, texts[1][:30], Sampling(64, temperature=0.0, logit_bias=((5, 0.0),)), 60)
    good = driver.stream(2, texts[2][:31], GREEDY, 60)
    driver.round((bad, 30), (good, 31))
    del driver.runner.parameters.bias[1]
    driver.round((good, WIDTH), (bad, WIDTH))
    assert "sampling failed" in bad.errors[0]
    driver.finish(good)
    assert good.prompt + good.output == texts[2][:60]


def test_parameters_that_cant_be_bound_fail_at_once_and_verify_nothing(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, _ = started(model, texts, 1, 2)
    bad = driver.stream(1, texts[1][:30], Sampling(64, logit_bias=((256, 1.0),)), 60)
    good = driver.stream(2, texts[2][:31], GREEDY, 60)
    steps = [driver.plan_round([(bad, 30), (good, 31)]), driver.plan_round([(bad, WIDTH), (good, WIDTH)])]
    for step in steps:
        done = driver.run(step)
        assert [group for group, _ in done.failed] == [0]
    assert done.verified == bytes([0, WIDTH])
    driver.finish(good)
    assert good.prompt + good.output == texts[2][:60]


def test_agreed_rows_may_stay_unused_and_never_be_exceeded(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, _ = started(model, texts, 1)
    stream = driver.stream(1, texts[1][:30], GREEDY, 33)
    driver.round((stream, 30))
    planned = driver.plan_round([(stream, WIDTH)])
    tight = msgspec.structs.replace(planned.step, ranks=((1, 1, 1),))
    loose = replace(planned, step=msgspec.structs.replace(planned.step, ranks=((1, WIDTH, WIDTH),)))
    assert driver.run(loose).verified == bytes([2])
    again, _ = started(model, texts, 1)
    stream = again.stream(1, texts[1][:30], GREEDY, 33)
    again.round((stream, 30))
    with pytest.raises(ShapeMismatch, match="has 2 rows, but the ranks agreed on 1"):
        again.runner.execute(tight)


def test_a_step_with_verify_needs_a_draft(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, _ = started(model, texts, 1)
    stream = driver.stream(1, texts[1][:30], GREEDY, 60)
    step = driver.plan_round([(stream, 30)]).step
    plain = type(driver.runner)(model, driver.runner.state, (1,))
    with pytest.raises(ShapeMismatch, match="no draft was loaded"):
        plain.execute(step)


def test_a_length_above_the_hosts_bound_is_a_fault(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, _ = started(model, texts, 1)
    stream = driver.stream(1, texts[1][:30], GREEDY, 60)
    driver.round((stream, 30))
    step = driver.plan_round([(stream, WIDTH)]).step
    low = msgspec.structs.replace(step, starts=np.array([29], np.int32).tobytes())
    with pytest.raises(PageAccounting, match="slot 1 has 30 committed tokens, the step starts it at 29"):
        driver.runner.execute(low)


def test_idle_steps_and_one_token_prefills_beside_decoding(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    driver, _ = started(model, texts, 1, 2)
    done = driver.round()
    assert (done.counts, done.token_ids, done.verified, done.lengths) == (b"", b"", b"", b"")
    one = driver.stream(1, texts[1][:30], GREEDY, 60)
    scored = Sampling(1, temperature=0.0, logprobs=1, prompt_logprobs=1)
    two = driver.stream(2, texts[2][:31], scored, 32)
    driver.round((one, 30), (two, 30))
    done = driver.round((two, 1), (one, WIDTH))
    assert (done.verified, done.counts) == (bytes([0, WIDTH]), bytes([1, WIDTH]))
    assert done.logprobs is not None
    chosen = np.frombuffer(done.logprobs.chosen, np.float32)
    assert np.isnan(chosen).tolist() == [False] + [True] * WIDTH
    assert two.output == texts[2][31:32]


class OddDrafts:
    """Allows odd tokens only, in these rows of drafts."""

    def __init__(self, groups: int, rows: Int) -> None:
        self.groups, self.places, self.rows = groups, rows, torch.from_numpy(rows)

    def guided(self, choose: Choose) -> Choose:
        def pick(k: int, z: Tensor) -> Tensor:
            z[self.rows, ::2] = -torch.inf
            return choose(k, z)

        return pick

    def worth(self) -> Int:
        return np.full(self.groups, WIDTH)

    def certain(self) -> NDArray[np.bool_]:
        return np.zeros((self.groups, BLOCK), np.bool_)


class Odd:
    """Allows odd tokens only, of the requests in `slots`."""

    def __init__(self, slots: set[int]) -> None:
        self.slots = slots
        self.begun: list[tuple[int, int, list[int], list[int], list[list[int]]]] = []
        self.kept: dict[int, list[list[int]]] = {}
        self.groups: MaskGroups | None = None

    def bind(self, bind: SlotBind) -> str:
        return ""

    def wait_read(self, mask_slot: int) -> None:
        return

    def guide(self, epoch: int, slots: Int, anchors: Int) -> OddDrafts | None:
        own = self.constrained(slots)
        return OddDrafts(slots.size, own) if own.size else None

    def constrained(self, slots: Int) -> Int:
        return np.flatnonzero([slot in self.slots for slot in slots.tolist()])

    def begin(self, epoch: int, mask_slot: int, groups: MaskGroups) -> None:
        self.groups = groups
        slots, anchors, widths, tokens = (column.tolist() for column in groups)
        assert widths[len(tokens) :] == [1] * (len(slots) - len(tokens))
        self.begun.append((epoch, mask_slot, slots, anchors, tokens))

    def finish(self, epoch: int) -> Masks:
        assert epoch == self.begun[-1][0]
        assert self.groups is not None
        own, widths = self.constrained(self.groups.slots), self.groups.widths
        rows = np.flatnonzero(np.repeat(np.isin(np.arange(widths.size), own), widths))
        odd = torch.full((rows.size, 8), -0x55555556, dtype=torch.int32)
        return Masks(MaskWords(odd, rows), self.groups.anchors[own], widths[own], {})

    def retain(self, epoch: int, tokens: list[list[int]]) -> list[bool]:
        self.kept[epoch] = [list(run) for run in tokens]
        return [False] * len(tokens)


def test_masks_hold_for_drafted_sampled_and_first_tokens(
    model: DeepseekV4, texts: dict[int, list[int]]
) -> None:
    odd = Odd({2})
    driver, drafter = scripted_driver(model, "compact", odd)  # type: ignore[arg-type]
    drafter.texts = dict(texts)
    drafter.check_anchors = False
    one, two = (driver.stream(slot, texts[slot][: 29 + slot], GREEDY, 60) for slot in (1, 2))
    driver.round((one, 30), (two, 31))
    driver.round((two, WIDTH), (one, WIDTH), budget=0)
    driver.finish(one, two)
    assert one.prompt + one.output == texts[1][:60]
    assert len(two.output) == 29
    assert all(token % 2 for token in two.output)
    _, _, slots, anchors, tokens = odd.begun[2]
    assert (slots, anchors) == ([1, 2], [32, 33])
    assert tokens[0] == texts[1][31 : 31 + WIDTH + 1][: len(tokens[0])]
    assert {mask_slot for _, mask_slot, *_ in odd.begun} == {0, 1}
    assert [token for run in odd.kept.values() for token in run[0]] == two.output


def test_a_drafter_of_next_tokens_gets_them(model: DeepseekV4, texts: dict[int, list[int]]) -> None:
    driver, drafter = scripted_driver(model, next_tokens=True)
    drafter.texts = {1: texts[1]}
    drafter.wrong = {(1, p) for p in range(33, 70, 5)}
    stream = driver.stream(1, texts[1][:30], GREEDY, 60)
    driver.round((stream, 11))
    driver.round((stream, 19))
    driver.round((stream, WIDTH))
    for _ in range(3):
        driver.round((stream, WIDTH), budget=0)
    driver.finish(stream)
    assert stream.prompt + stream.output == texts[1][:60]
    assert sorted(drafter.next_seen) == [(1, p) for p in range(max(p for _, p in drafter.next_seen) + 1)]
    assert all(token == texts[1][p + 1] for (_, p), token in drafter.next_seen.items())
