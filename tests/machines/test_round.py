"""The round by hand: what it keeps of its slots, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.actors.round import (
    Accepted,
    Begin,
    Bind,
    Committed,
    Drafted,
    Failed,
    Injected,
    LaidOut,
    MaskBegun,
    MaskRead,
    MaskReady,
    Round,
    Verified,
)
from engine.errors import Unexpected

GAMMA = 5
PROMPT = 200


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def fire(core: Round, *events: Any) -> None:
    for event in events:
        assert core.receive(event) == []


def served(*slots: int, ends_at: int = 0) -> Round:
    """Slots of generation 1 whose prompts are committed."""
    core = Round(slots=4)
    for slot in slots:
        fire(core, Bind(slot, 1, 0, ends_at))
    chunk = ints(*[PROMPT] * len(slots))
    fire(core, begun(1, slots, chunks=chunk, caps=chunk * 0), LaidOut(chunk), Verified())
    fire(core, Accepted(chunk), Committed())
    return core


def begun(epoch: int, slots: tuple[int, ...], **changes: Any) -> Begin:
    count = len(slots)
    step = Begin(
        epoch, ints(*slots), ints(*[1] * count), ints(*[0] * count),
        np.full(count, GAMMA + 1, np.uint8), count * (GAMMA + 1),
    )  # fmt: skip
    return step._replace(**changes)


def draft(core: Round, *slots: int, window: int = 128) -> None:
    """Injects the last `window` rows that wait, and drafts."""
    at = ints(*slots)
    first = np.maximum(core.injected[at], core.lengths[at] - window)
    fire(core, Injected(at, first, core.lengths[at] - first), Drafted())


def test_a_step_commits_what_it_keeps_and_the_next_one_injects_that() -> None:
    core = served(1, 2)
    fire(core, begun(2, (1, 2)))
    draft(core, 1, 2)
    assert core.caps.tolist() == [6, 6]
    fire(core, LaidOut(ints(4, 1)), Verified(), Accepted(ints(3, 1)), Committed())
    assert core.lengths.tolist() == [0, PROMPT + 3, PROMPT + 1, 0]
    assert core.injected.tolist() == [0, PROMPT, PROMPT, 0]
    # A step that doesn't draft leaves its row to wait, too.
    fire(core, begun(3, (1,)), LaidOut(ints(1)), Verified(), Accepted(ints(1)), Committed())
    fire(core, begun(4, (1, 2)))
    draft(core, 1, 2)
    assert core.injected.tolist() == [0, PROMPT + 4, PROMPT + 1, 0]


def test_rows_of_zero_change_nothing() -> None:
    core, other = served(1, 2, 3, ends_at=PROMPT + 8), served(1, 2, 3, ends_at=PROMPT + 8)
    core.lengths[2] = other.lengths[2] = core.injected[2] = other.injected[2] = PROMPT + 7  # It has ended.
    for one, slots, lens in ((core, (1, 2, 3), (3, 0, 2)), (other, (1, 3), (3, 2))):
        fire(one, begun(2, slots))
        assert one.caps.tolist() == [6 if slot != 2 else 0 for slot in slots]
        draft(one, 1, 3)
        fire(one, LaidOut(ints(*lens)), Verified(), Accepted(ints(*lens)), Committed())
    for name in ("lengths", "injected", "generations"):
        assert np.array_equal(getattr(core, name), getattr(other, name))
    # An idle rank's step has no group at all.
    before = core.lengths.copy()
    fire(core, begun(3, ()), LaidOut(ints()), Verified(), Accepted(ints()), Committed())
    assert np.array_equal(core.lengths, before)


def test_a_request_near_its_end_verifies_what_it_may_still_keep() -> None:
    core = served(1, ends_at=PROMPT + 3)  # The prompt, the anchor, and two more.
    fire(core, begun(2, (1,)))
    assert core.caps.tolist() == [2]
    draft(core, 1)
    with pytest.raises(Unexpected, match="LaidOut in drafted"):
        core.receive(LaidOut(ints(3)))
    fire(core, LaidOut(ints(2)), Verified(), Accepted(ints(2)), Committed(), begun(3, (1,)))
    assert core.caps.tolist() == [0]


def test_another_generation_is_refused_until_the_slot_is_bound() -> None:
    core = served(1)
    newer = begun(2, (1,), generations=ints(2))
    with pytest.raises(Unexpected, match="Begin in resting"):
        core.receive(newer)
    fire(core, Bind(1, 2, length=256), newer)  # With a prefix hit of a page.
    assert core.lengths[1] == core.injected[1] == 256
    fire(core, Drafted())  # The hit's taps were never seen: nothing waits.


def test_a_group_that_failed_may_keep_nothing_but_chunks_stay_whole() -> None:
    core = served(1, 2)
    fire(core, Bind(3, 1), begun(2, (1, 2, 3), chunks=ints(0, 0, 7), caps=ints(6, 6, 0)))
    fire(core, LaidOut(ints(1, 1, 7)), Verified())
    with pytest.raises(Unexpected, match="Accepted in judging"):
        core.receive(Accepted(ints(0, 1, 7)))
    with pytest.raises(Unexpected, match="Accepted in judging"):
        core.receive(Accepted(ints(0, 1, 6), failed=ints(0)))
    fire(core, Accepted(ints(0, 1, 7), failed=ints(0)), Committed())
    assert core.lengths.tolist() == [0, PROMPT, PROMPT + 1, 7]


def test_masks_are_of_this_step_and_of_matchers_at_its_anchors() -> None:
    core = served(1, 2)
    fire(core, begun(2, (1, 2)))
    draft(core, 1, 2)
    fire(core, LaidOut(ints(3, 3)), MaskBegun(0, ints(0, 1)), Verified())
    for stale in (
        MaskReady(1, ints(PROMPT + 1, PROMPT + 1)),
        MaskReady(2, ints(PROMPT, PROMPT + 1)),
        MaskReady(2, ints(PROMPT + 1, PROMPT + 2)),
        MaskReady(2, ints(PROMPT + 1)),
    ):
        with pytest.raises(Unexpected, match="MaskReady in awaiting"):
            core.receive(stale)
    fire(core, MaskReady(2, ints(PROMPT + 1, -1)))
    assert core.most.tolist() == [3, 0]
    with pytest.raises(Unexpected, match="Accepted in judging"):
        core.receive(Accepted(ints(3, 1)))
    fire(core, Accepted(ints(3, 0)), Committed())


def test_a_mask_slot_is_filled_again_when_it_was_read() -> None:
    core = served(1)
    for epoch, slot in ((2, 0), (3, 1)):
        assert core.open_mask_slot == slot
        fire(core, begun(epoch, (1,)), LaidOut(ints(1)), MaskBegun(slot, ints(0)), Verified())
        fire(core, MaskReady(epoch, ints(core.lengths[1] + 1)), Accepted(ints(1)), Committed())
    assert core.open_mask_slot == -1
    fire(core, begun(4, (1,)), LaidOut(ints(1)))
    with pytest.raises(Unexpected, match="MaskBegun in laid_out"):
        core.receive(MaskBegun(1, ints(0)))
    fire(core, MaskRead(1))
    with pytest.raises(Unexpected, match="MaskRead in laid_out"):
        core.receive(MaskRead(1))
    fire(core, MaskBegun(1, ints(0)), Verified())


def test_a_step_that_raised_is_the_last_one() -> None:
    core = served(1)
    fire(core, begun(2, (1,)), Failed())
    assert core.state == "broken"
    with pytest.raises(Unexpected, match="Begin in broken"):
        core.receive(begun(3, (1,)))
