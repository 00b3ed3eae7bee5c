"""The description of one step's batch. `build_batch` is its one constructor; no field has a default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import ShapeMismatch
from engine.messages import RunStep

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RankLoad:
    """One rank's share of a step.

    requests       row groups
    raw_tokens     rows before any request was dropped from the step
    live_tokens    rows that belong to a request
    padded_tokens  rows that are run
    """

    requests: int
    raw_tokens: int
    live_tokens: int
    padded_tokens: int


@dataclass(frozen=True)
class ForwardBatch:
    """One step of this rank, and the sizes of its peers'.

    loads         one entry a rank; `rank` is this one's place
    mode          "extend", "decode", "mixed" or "idle"
    slots, generations, starts, counts  int32 [B], as in RunStep
    capacities    int32 [B], rows that each slot may commit
    tokens        int32 [live tokens], -1 takes the slot's relay token
    logit_rows    int32 [R], step rows whose logits are wanted
    taps          layers whose outputs are captured
    graph_key     name of the captured graph that runs the step; empty: eager
    tbo_boundary  request at which the batch is halved for overlapped execution; -1: not halved
    cp_segments   (first row, rows) of this rank's context-parallel segments; empty: none
    """

    rank: int
    loads: tuple[RankLoad, ...]
    mode: str
    slots: Int32
    generations: Int32
    starts: Int32
    counts: Int32
    capacities: Int32
    tokens: Int32
    logit_rows: Int32
    taps: tuple[int, ...]
    graph_key: str
    tbo_boundary: int
    cp_segments: tuple[tuple[int, int], ...]

    @property
    def load(self) -> RankLoad:
        """This rank's own share."""
        return self.loads[self.rank]


def build_batch(
    step: RunStep,
    *,
    rank: int,
    peers: Sequence[RankLoad],
    row_tile: int,
    every_logit: bool,
    taps: tuple[int, ...],
    graph_key: str,
    tbo_boundary: int,
    cp_segments: tuple[tuple[int, int], ...],
) -> ForwardBatch:
    """The batch of a RunStep.

    peers        loads of the other ranks in rank order, this one left out
    row_tile     run rows are padded to a multiple of this
    every_logit  True: logits of every row, else of the last row of each group with `samples` 1
    raises       ShapeMismatch where two columns of the step disagree
    """
    slots, generations, starts, counts, tokens = (
        np.frombuffer(column, dtype=np.int32)
        for column in (step.slots, step.generations, step.starts, step.counts, step.tokens)
    )
    samples = np.frombuffer(step.samples, dtype=np.uint8)
    sizes = (slots.size, generations.size, starts.size, counts.size, samples.size)
    if len(set(sizes)) != 1:
        raise ShapeMismatch(f"step {step.epoch}: columns slots to samples hold {sizes} entries")
    live = int(counts.sum())
    if live != tokens.size or (counts.size and counts.min() < 1):
        raise ShapeMismatch(f"step {step.epoch}: counts {counts.tolist()} against {tokens.size} tokens")
    padded = -(-live // row_tile) * row_tile
    last_rows = np.cumsum(counts, dtype=np.int32) - 1
    logit_rows = np.arange(live, dtype=np.int32) if every_logit else last_rows[samples != 0]
    own = RankLoad(slots.size, live, live, padded)
    return ForwardBatch(
        rank=rank,
        loads=(*peers[:rank], own, *peers[rank:]),
        mode=step.mode,
        slots=slots,
        generations=generations,
        starts=starts,
        counts=counts,
        capacities=counts,
        tokens=tokens,
        logit_rows=logit_rows,
        taps=taps,
        graph_key=graph_key,
        tbo_boundary=tbo_boundary,
        cp_segments=cp_segments,
    )
