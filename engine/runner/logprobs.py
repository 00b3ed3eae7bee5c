"""Log probabilities of the raw target distribution: natural logarithms of the softmax of unedited logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.messages import LogprobColumns


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of n tokens, each with its own number of best alternatives, on the device.

    chosen  float32 [n]
    ids     int64 [n, K] best first, values  float32 [n, K]; row i's first `tops[i]` count
    """

    chosen: Tensor
    ids: Tensor
    values: Tensor
    tops: tuple[int, ...]


def token_logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> TokenLogprobs:
    """Log probability of each row's token, and of the row's best ones.

    logits  float32 [n, V] as the model gave them
    tokens  int64 [n]
    tops    how many of the best each row wants, 0 .. V
    """
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, tokens[:, None])[:, 0] - normaliser
    best = logits.topk(max(tops, default=0), -1)
    return TokenLogprobs(chosen, best.indices, best.values - normaliser[:, None], tuple(tops))


@dataclass(frozen=True, slots=True)
class HostColumns:
    """The four columns of one kind of logprobs, as messages carry them."""

    chosen: bytes
    top_counts: bytes
    top_ids: bytes
    top_values: bytes


def columns(rows: int, at: Sequence[int], found: TokenLogprobs) -> HostColumns:
    """Columns of `rows` tokens of which those `at` have logprobs; the others' chosen is NaN, without tops."""
    chosen = np.full(rows, np.nan, np.float32)
    counts = np.zeros(rows, np.uint8)
    chosen[list(at)] = found.chosen.cpu().numpy()
    counts[list(at)] = found.tops
    ids, values = found.ids.cpu().numpy().astype(np.int32), found.values.cpu().numpy()
    wanted = np.arange(ids.shape[1])[None, :] < np.asarray(found.tops)[:, None]
    return HostColumns(chosen.tobytes(), counts.tobytes(), ids[wanted].tobytes(), values[wanted].tobytes())


NO_COLUMNS = HostColumns(b"", b"", b"", b"")


def message(
    output: HostColumns, prompt: HostColumns, prompt_rows: Sequence[tuple[int, int]]
) -> LogprobColumns:
    """The message of a step's output and prompt logprobs.

    prompt_rows  (row group, position of the scored prompt token) of each entry of `prompt`
    """
    return LogprobColumns(
        chosen=output.chosen,
        top_counts=output.top_counts,
        top_ids=output.top_ids,
        top_values=output.top_values,
        prompt_rows=np.asarray(prompt_rows, np.int32).tobytes(),
        prompt_chosen=prompt.chosen,
        prompt_top_counts=prompt.top_counts,
        prompt_top_ids=prompt.top_ids,
        prompt_top_values=prompt.top_values,
    )


def nothing_chosen(rows: int) -> HostColumns:
    """Columns of `rows` tokens none of which asked for logprobs."""
    nan = np.full(rows, np.nan, np.float32)
    return HostColumns(nan.tobytes(), bytes(rows), b"", b"")
