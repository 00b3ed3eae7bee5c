"""Logprob columns keep to the rows that live, whatever was dropped or computed twice."""

from __future__ import annotations

import numpy as np

from engine.messages import LogprobColumns, StepDone
from tests.machines.harness import Harness, submit_of


def columns(tokens: list[int], tops: list[int], prompts: list[tuple[int, int]]) -> LogprobColumns:
    """One entry a token with its id as its value, and one a prompt row with its position as its value."""
    ids = [token * 10 + place for token, top in zip(tokens, tops, strict=True) for place in range(top)]
    return LogprobColumns(
        np.array(tokens, np.float32).tobytes(),
        bytes(tops),
        np.array(ids, np.int32).tobytes(),
        np.array(ids, np.float32).tobytes(),
        np.array(prompts, np.int32).tobytes(),
        np.array([position for _, position in prompts], np.float32).tobytes(),
        bytes(len(prompts)),
    )


def floats(data: bytes) -> list[float]:
    return np.frombuffer(data, np.float32).tolist()


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def answer(h: Harness, tokens: list[int], logprobs: LogprobColumns) -> None:
    """The oldest step ends with these tokens."""
    step = h.jobs[0].popleft()
    h.tell(StepDone(step.epoch, step.samples, np.array(tokens, np.int32).tobytes(), (), logprobs))


def test_columns_pass_unchanged_while_every_row_lives() -> None:
    h = Harness()
    h.submit(submit_of(1, 4, 9, logprobs=2), submit_of(2, 4, 9))
    sent = columns([7, 8], [2, 0], [])
    answer(h, [7, 8], sent)
    assert h.outs[-1].logprobs == sent


def test_a_row_that_ended_takes_its_entries_with_it() -> None:
    h = Harness()
    h.submit(submit_of(1, 4, 9, logprobs=2), submit_of(2, 4, 9, logprobs=1))
    answer(h, [7, 8], columns([7, 8], [2, 1], []))
    h.abort(1)
    answer(h, [7, 8], columns([7, 8], [2, 1], []))
    out = h.outs[-1].logprobs
    assert out is not None
    assert floats(out.chosen) == [8.0]
    assert (list(out.top_counts), ints(out.top_ids), floats(out.top_values)) == ([1], [80], [80.0])


def test_prompt_rows_are_numbered_as_the_rows_that_go_out() -> None:
    h = Harness()
    h.submit(*[submit_of(number, 4, 9, prompt_logprobs=0) for number in (1, 2)])
    h.abort(1)
    answer(h, [7, 8], columns([7, 8], [0, 0], [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]))
    out = h.outs[-1]
    assert out.logprobs is not None
    assert np.frombuffer(out.request_ids, np.int64).tolist() == [2]
    assert ints(out.logprobs.prompt_rows) == [0, 1, 0, 2, 0, 3]
    assert floats(out.logprobs.prompt_chosen) == [1.0, 2.0, 3.0]


def test_a_chunk_without_a_token_still_tells_its_prompt_logprobs() -> None:
    h = Harness(chunk_tokens=256)
    h.submit(submit_of(1, 300, 9, prompt_logprobs=0))
    answer(h, [], columns([], [], [(0, 1)]))
    out = h.outs[-1]
    assert list(out.counts) == [0]
    assert out.logprobs is not None
    assert ints(out.logprobs.prompt_rows) == [0, 1]


def test_prompt_logprobs_that_are_computed_again_do_not_go_out_again() -> None:
    h = Harness(chunk_tokens=256)
    h.submit(submit_of(1, 300, 9, prompt_logprobs=0))
    answer(h, [], columns([], [], [(0, 1), (0, 2)]))
    answer(h, [7], columns([7], [0], [(0, 2), (0, 3)]))
    out = h.outs[-1].logprobs
    assert out is not None
    assert ints(out.prompt_rows) == [0, 3]
    assert floats(out.prompt_chosen) == [3.0]
