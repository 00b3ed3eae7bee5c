"""Logprob columns of a step without the rows that ended before it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.actors.requests import Requests
from engine.actors.schedule import Rows
from engine.messages import LogprobColumns


class Kept(NamedTuple):
    """Which rows of a step are told of.

    rows    of the request table, [B]
    live    bool[B]: not ended before the step
    counts  uint8[B] tokens of the step that count, those before the request's end
    places  intp[n] row of each token that the step sampled
    within  bool[n]: it counts
    """

    rows: Rows
    live: NDArray[np.bool_]
    counts: NDArray[np.uint8]
    places: Rows
    within: NDArray[np.bool_]

    @property
    def told(self) -> NDArray[np.bool_]:
        """bool[B]: rows that gained a token."""
        return self.live & (self.counts > 0)

    @property
    def tokens(self) -> NDArray[np.bool_]:
        """bool[n]: tokens that go out."""
        return self.live[self.places] & self.within


def kept_logprobs(
    columns: LogprobColumns, kept: Kept, requests: Requests
) -> tuple[LogprobColumns | None, Rows]:
    """The columns of live rows, their prompt rows numbered anew, and which rows of B have prompt logprobs.

    Prompt positions that went out before a retraction don't go out again. None where nothing is left.
    """
    tokens = kept.tokens
    prompts = np.frombuffer(columns.prompt_rows, np.int32).reshape(-1, 2)
    groups, positions = prompts[:, 0].astype(np.intp), prompts[:, 1]
    fresh = kept.live[groups] & (positions >= requests.echoed[kept.rows[groups]])
    groups, positions = groups[fresh], positions[fresh]
    np.maximum.at(requests.echoed, kept.rows[groups], positions + 1)
    echoes = np.unique(groups)
    told = kept.told
    told[echoes] = True
    if not tokens.any() and not echoes.size:
        return None, echoes
    chosen, top_counts, top_ids, top_values = _filtered(
        columns.chosen, columns.top_counts, columns.top_ids, columns.top_values, tokens
    )
    prompt_columns = _filtered(
        columns.prompt_chosen,
        columns.prompt_top_counts,
        columns.prompt_top_ids,
        columns.prompt_top_values,
        fresh,
    )
    numbers = np.cumsum(told) - 1
    renumbered = np.stack([numbers[groups], positions], 1).astype(np.int32)
    return LogprobColumns(
        chosen, top_counts, top_ids, top_values, renumbered.tobytes(), *prompt_columns
    ), echoes


def _filtered(
    chosen: bytes, top_counts: bytes, top_ids: bytes, top_values: bytes, kept: NDArray[np.bool_]
) -> tuple[bytes, bytes, bytes, bytes]:
    """The entries of tokens where `kept`, bool[n], is true."""
    if kept.all():
        return chosen, top_counts, top_ids, top_values
    counts = np.frombuffer(top_counts, np.uint8)
    tops = np.repeat(kept, counts)
    return (
        np.frombuffer(chosen, np.float32)[kept].tobytes(),
        counts[kept].tobytes(),
        np.frombuffer(top_ids, np.int32)[tops].tobytes(),
        np.frombuffer(top_values, np.float32)[tops].tobytes(),
    )
