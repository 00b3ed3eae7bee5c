"""How a packed step of fixed shape lies in its one buffer: sizes, columns, and the step without a request."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.model.config import C4, PAGE_TOKENS, ModelConfig
from engine.runner.batch import ForwardBatch
from engine.runner.columns import Int
from engine.runner.plan import SINK_ROW

C128_COLUMNS = ("c128_slots", "c128_fresh", "c128_firsts", "c128_counts", "c128_out_rows", "c128_positions")
"""As C128Entries has them."""


class GraphKey(NamedTuple):
    """Sizes of a captured step.

    tokens  padded rows, the bucket that the ranks agreed on
    slots   most requests
    pages   most pages of a request
    width   most rows of a request, at most 128
    """

    tokens: int
    slots: int
    pages: int
    width: int

    @property
    def name(self) -> str:
        """As ForwardBatch.graph_key has it."""
        return f"{self.tokens}x{self.slots}x{self.pages}"

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether the batch's rows, requests and lengths have room."""
        return (
            batch.load.padded_tokens == self.tokens
            and batch.slots.size <= self.slots
            and int(batch.counts.max(initial=0)) <= self.width
            and int((batch.starts + batch.counts).max(initial=0)) <= self.pages * PAGE_TOKENS
        )


def shapes(key: GraphKey, window: int) -> dict[str, tuple[int, ...]]:
    """Columns of a packed step of this key, in their order; of windows of so many tokens.

    Of T rows: token_ids, position, latent_rows, row_slots, request (-1: padding), window [T, 128]
    c4_*     the c4 windows that close, at most one a row
    c128_*   the c128 windows that close, at most one a request
    slots    of the requests, 0 for padding; pages [S, M] full pages of each
    """
    rows, slots = (key.tokens,), (key.slots,)
    return {
        "token_ids": rows,
        "position": rows,
        "latent_rows": rows,
        "row_slots": rows,
        "request": rows,
        "window": (key.tokens, window),
        "c4_halves": (key.tokens, 2 * C4),
        "c4_position": rows,
        "c4_out": rows,
        **dict.fromkeys(C128_COLUMNS, slots),
        "slots": slots,
        "pages": (key.slots, key.pages),
    }


class Place(NamedTuple):
    """Where a column lies in a packed step."""

    first: int
    end: int
    shape: tuple[int, ...]


@lru_cache(1024)
def places_of(key: GraphKey, window: int) -> dict[str, Place]:
    """Of each column; a step looks it up, and there are as many as sizes."""
    out, first = {}, 0
    for name, shape in shapes(key, window).items():
        end = first + math.prod(shape)
        out[name] = Place(first, end, shape)
        first = end
    return out


def length(key: GraphKey, config: ModelConfig) -> int:
    """Numbers of a packed step."""
    return places_of(key, config.sliding_window)["pages"].end


def views(packed: Tensor, key: GraphKey, config: ModelConfig) -> dict[str, Tensor]:
    """The columns of `packed` [at least length(key)] by name."""
    places = places_of(key, config.sliding_window)
    return {name: packed[place.first : place.end].view(place.shape) for name, place in places.items()}


@lru_cache(1024)
def _nobody(key: GraphKey, window: int) -> Int:
    """A packed step without any request."""
    places = places_of(key, window)
    packed = np.zeros(places["pages"].end, np.int64)
    values = {"latent_rows": SINK_ROW, "c4_out": SINK_ROW, "c128_out_rows": SINK_ROW, "request": -1}
    # One row of an empty state: a mean over none would be no number.
    for name, value in {**values, "c128_fresh": 1, "c128_counts": 1}.items():
        packed[places[name].first : places[name].end] = value
    packed.flags.writeable = False
    return packed


def blank(key: GraphKey, config: ModelConfig) -> tuple[Int, dict[str, Int]]:
    """A packed step without any request, on the host, and its columns."""
    packed = _nobody(key, config.sliding_window).copy()
    places = places_of(key, config.sliding_window)
    return packed, {name: packed[one.first : one.end].reshape(one.shape) for name, one in places.items()}
