"""A step's columns read as rows of requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.messages import LogprobColumns, PromptLogprob, StepOut, TokenLogprob


class Row(NamedTuple):
    """What one request gained in a step. `logprobs` is empty, or has one entry a token.

    verified, accepted  drafted tokens
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish: int
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[PromptLogprob, ...]
    verified: int = 0
    accepted: int = 0


def rows_of(step: StepOut) -> Iterator[Row]:
    """The rows in their order."""
    ids = np.frombuffer(step.request_ids, dtype=np.int64).tolist()
    counts = list(step.counts)
    tokens = np.frombuffer(step.token_ids, dtype=np.int32).tolist()
    columns = step.logprobs
    logprobs = () if columns is None else _token_logprobs(columns, tokens)
    prompts = {} if columns is None else _prompt_logprobs(columns)
    none = bytes(len(ids))
    drafts = zip(step.verified or none, step.accepted or none, strict=True)
    start = 0
    for number, (request_id, count, draft) in enumerate(zip(ids, counts, drafts, strict=True)):
        end = start + count
        yield Row(
            request_id,
            tuple(tokens[start:end]),
            step.finish[number],
            logprobs[start:end],
            tuple(prompts.get(number, ())),
            *draft,
        )
        start = end


def _token_logprobs(columns: LogprobColumns, tokens: list[int]) -> tuple[TokenLogprob, ...]:
    chosen = np.frombuffer(columns.chosen, dtype=np.float32).tolist()
    tops = _tops(columns.top_counts, columns.top_ids, columns.top_values)
    return tuple(
        TokenLogprob(token, value, top) for token, value, top in zip(tokens, chosen, tops, strict=True)
    )


def _prompt_logprobs(columns: LogprobColumns) -> dict[int, list[PromptLogprob]]:
    """By row of the step."""
    places = np.frombuffer(columns.prompt_rows, dtype=np.int32).reshape(-1, 2).tolist()
    chosen = np.frombuffer(columns.prompt_chosen, dtype=np.float32).tolist()
    tops = _tops(columns.prompt_top_counts, columns.prompt_top_ids, columns.prompt_top_values)
    by_row: dict[int, list[PromptLogprob]] = defaultdict(list)
    for (row, position), value, top in zip(places, chosen, tops, strict=True):
        by_row[row].append(PromptLogprob(position, value, top))
    return by_row


def _tops(counts: bytes, ids: bytes, values: bytes) -> Iterator[tuple[tuple[int, float], ...]]:
    pairs = zip(
        np.frombuffer(ids, dtype=np.int32).tolist(),
        np.frombuffer(values, dtype=np.float32).tolist(),
        strict=True,
    )
    flat = tuple(pairs)
    start = 0
    for count in counts:
        yield flat[start : start + count]
        start += count
