"""Steps that are launched before the results of the one before have been looked at: the same text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.errors import PageAccounting
from engine.messages import RunStep, StepDone, Submit, SubmitBatch
from engine.model.model import DeepseekV4
from engine.runner.arrivals import Arrival, Arrivals
from engine.runner.step import StepRunner, waited
from tests.machines.test_rank_with_model import Served, submit
from tests.runner.test_spec_engine import folder, texts

__all__ = ["folder"]
"""A fixture of another file."""

PAGES, CHUNK = 20, 64
REQUESTS = [submit(1, 200, 9), submit(2, 126, 12), submit(3, 3, 30), submit(4, 30, 1)]


class Overlapped(Served):
    """As a device thread with the one beside it, as late as can be: two steps are launched before one ends.

    relayed   steps that were launched behind one whose tokens nobody had seen, and took some of them
    at_once   steps that had to be waited for
    """

    def __init__(self, model: DeepseekV4) -> None:
        super().__init__(model, PAGES, CHUNK)
        self.runner.overlaps = True
        self.relayed = self.at_once = 0

    def run(self, *items: Submit) -> dict[int, list[int]]:
        """As Served.run."""
        for item in items:
            self.tell(SubmitBatch((item,)))
        launched: deque[StepDone | Callable[[], StepDone]] = deque()
        while self.jobs or launched:
            while self.jobs:
                job = self.jobs.popleft()
                self.relayed += bool(launched) and takes_relays(job)
                launched.append(self.runner.launch(job))
            assert len(launched) <= 2
            step = launched.popleft()
            self.at_once += isinstance(step, StepDone)
            self.tell(waited(step))
        return self.text


def takes_relays(job: RunStep) -> bool:
    return bool((np.frombuffer(job.tokens, np.int32) < 0).any())


def changed(request: Submit, **sampling: object) -> Submit:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))


@pytest.fixture(scope="module")
def plain(native: DeepseekV4) -> dict[int, list[int]]:
    """What requests get whose steps are waited for one by one."""
    return Served(native, PAGES, CHUNK).run(*REQUESTS)


def test_requests_get_the_same_text(native: DeepseekV4, plain: dict[int, list[int]]) -> None:
    served = Overlapped(native)
    assert served.run(*REQUESTS) == plain
    assert served.relayed > 20
    assert not served.at_once
    assert not served.failed


def test_a_row_that_ran_in_vain_behind_a_stop_is_dropped(
    native: DeepseekV4, plain: dict[int, list[int]]
) -> None:
    stop = plain[3][7]
    asked = [*REQUESTS[:2], changed(REQUESTS[2], stop_token_ids=(stop,)), REQUESTS[3]]
    served = Overlapped(native)
    assert served.run(*asked) == plain | {3: plain[3][: plain[3].index(stop) + 1]}
    # Its slot and pages are there for another one, whose prompt the wasted row must not have touched.
    assert served.run(submit(5, 150, 6))[5] == Served(native, PAGES, CHUNK).run(submit(5, 150, 6))[5]


def test_sampled_and_penalised_rows_are_drawn_behind_the_tokens_before_them(native: DeepseekV4) -> None:
    asked = [
        changed(REQUESTS[0], temperature=0.9, top_p=0.9, frequency_penalty=0.7, seed=4),
        changed(REQUESTS[1], temperature=1.1, repetition_penalty=1.2, seed=5),
        REQUESTS[2],
    ]
    served = Overlapped(native)
    assert served.run(*asked) == Served(native, PAGES, CHUNK).run(*asked)
    assert served.relayed > 20


def test_steps_with_log_probabilities_are_waited_for_beside_others(
    native: DeepseekV4, plain: dict[int, list[int]]
) -> None:
    served = Overlapped(native)
    asked = [changed(REQUESTS[0], logprobs=2), *REQUESTS[1:]]
    assert served.run(*asked) == plain
    # One for each of its tokens, the last of which has another step behind it already.
    assert 9 <= served.at_once <= 10
    assert served.relayed > 20


def test_a_row_whose_logits_are_no_numbers_fails_alone(
    native: DeepseekV4, plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Overlapped(native)
    logits = native.logits

    def poisoned(streams: torch.Tensor, rows: object) -> torch.Tensor:
        out = logits(streams, rows)  # type: ignore[arg-type]
        if len(out) == 3 and not served.failed:
            out[1] = torch.nan
        return out

    monkeypatch.setattr(native, "logits", poisoned)
    found = served.run(*REQUESTS[:3])
    assert [failed.request_id for failed in served.failed] == [2]
    assert found[1] == plain[1]
    assert found[3] == plain[3]
    assert found[2] == plain[2][: len(found[2])]


def test_what_kernels_met_comes_with_the_results_of_the_step_that_met_it(
    native: DeepseekV4, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Overlapped(native)
    monkeypatch.setattr(native.ops, "faults", torch.zeros(1, dtype=torch.int32), raising=False)

    def check() -> None:
        raise PageAccounting("a kernel met indices outside")

    monkeypatch.setattr(native.ops, "check", check)
    served.tell(SubmitBatch((REQUESTS[0],)))
    waits = served.runner.launch(served.jobs.popleft())
    assert native.ops.faults is not None
    native.ops.faults[0] = 4
    assert callable(waits)
    # The step was launched before: its results are sound.
    assert waits().epoch == 0
    behind = served.runner.launch(served.jobs.popleft())
    assert callable(behind)
    with pytest.raises(PageAccounting, match="indices outside"):
        behind()


def test_the_whole_engine_gives_the_same_text_with_results_on_a_thread_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, waits, behind, open_steps = texts(folder, 0.4), Arrival.wait, 0, 0
    made, launch = StepRunner.__init__, StepRunner.launch

    def overlapping(self: StepRunner, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        self.overlaps = True

    def noted(self: StepRunner, job: RunStep) -> Any:
        nonlocal behind, open_steps
        behind += open_steps > 0
        open_steps += 1
        return launch(self, job)

    def late(self: Arrival) -> Any:
        nonlocal open_steps
        # A device's results come a while later; the step that is prepared is launched meanwhile.
        time.sleep(0.002)
        open_steps -= 1
        return waits(self)

    monkeypatch.setattr(StepRunner, "__init__", overlapping)
    monkeypatch.setattr(StepRunner, "launch", noted)
    monkeypatch.setattr(Arrival, "wait", late)
    assert texts(folder, 0.4) == plain
    assert behind


def test_no_step_takes_less_than_nothing_where_an_older_end_is_noted_meanwhile(
    native: DeepseekV4, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A counter that falls counts as one of another process, and all of it is added once more.
    older = property(lambda self: 0.0, lambda self, value: None)
    monkeypatch.setattr(StepRunner, "_last_end_s", older, raising=False)
    served = Served(native, PAGES, CHUNK)
    served.tell(SubmitBatch((REQUESTS[2],)))
    assert served.runner.execute(served.jobs.popleft()).seconds > 0


def test_values_are_those_at_the_time_of_the_call() -> None:
    tensor = torch.arange(4)
    arrival = Arrivals(torch.device("cpu")).bring([tensor])
    tensor.zero_()
    assert arrival.wait()[0].tolist() == [0, 1, 2, 3]
