"""The description of one step's batch. `build_batch` is its one constructor; no field has a default."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import ShapeMismatch
from engine.messages import RunStep

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RankLoad:
    """One rank's share of a step.

    requests       row groups; of a peer that reads prompts -1, as it tells its tokens only
    raw_tokens     rows before any request was dropped from the step
    live_tokens    rows that belong to a request
    padded_tokens  rows that are run
    logit_rows     most rows whose logits are wanted
    """

    requests: int
    raw_tokens: int
    live_tokens: int
    padded_tokens: int
    logit_rows: int


@dataclass(frozen=True)
class ForwardBatch:
    """One step of this rank, and the sizes of its peers'.

    loads         one entry a rank; `rank` is this one's place
    agreed_rows   rows that each rank brings to the experts, padding included
    agreed_logits rows that each rank brings to a head that is split over ranks
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
    agreed_rows: int
    agreed_logits: int
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


class _Agreed:
    """What a step says of all ranks; a step that says nothing has one."""

    def __init__(self, step: RunStep, live: int, logit_rows: int, row_tile: int, idle_runs: bool) -> None:
        self.ranks = step.ranks or ((0, live, logit_rows),)
        self.tokens = tuple(tokens for _, tokens, _ in self.ranks)
        self.most_logits = max(logits for _, _, logits in self.ranks)
        self.bucket, self.row_tile = step.bucket, row_tile
        self.least = int(idle_runs and any(self.tokens))

    def run(self, live: int) -> int:
        """Rows that a rank with so many tokens runs."""
        return self.bucket or -(-max(live, self.least) // self.row_tile) * self.row_tile

    def load(self, rank: int) -> RankLoad:
        """Another rank's load, by what it told."""
        requests, tokens, logit_rows = self.ranks[rank]
        return RankLoad(requests, tokens, tokens, self.run(tokens), logit_rows)


def build_batch(
    step: RunStep,
    *,
    rank: int,
    row_tile: int,
    idle_runs: bool,
    every_logit: bool,
    taps: tuple[int, ...],
    graph_key: str,
    tbo_boundary: int,
    cp_segments: tuple[tuple[int, int], ...],
) -> ForwardBatch:
    """The batch of a RunStep.

    row_tile     run rows are padded to a multiple of this
    idle_runs    a rank without tokens runs padding where another one has some: layers have collectives
    every_logit  True: logits of every row, else of the last row of each group with `samples` 1
    raises       ShapeMismatch where two columns of the step disagree, or the step and what was agreed
    """
    slots, generations, starts, counts, tokens, samples = _columns(step)
    live = tokens.size
    last_rows = np.cumsum(counts, dtype=np.int32) - 1
    logit_rows = np.arange(live, dtype=np.int32) if every_logit else last_rows[samples != 0]
    agreed = _Agreed(step, live, logit_rows.size, row_tile, idle_runs)
    _check_agreed(step, live, agreed.tokens[rank])
    own = RankLoad(slots.size, live, live, agreed.run(live), logit_rows.size)
    most = max(agreed.tokens)
    return ForwardBatch(
        rank=rank,
        loads=tuple(own if peer == rank else agreed.load(peer) for peer in range(len(agreed.tokens))),
        agreed_rows=agreed.run(most),
        agreed_logits=most if every_logit else agreed.most_logits,
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


def _columns(step: RunStep) -> tuple[Int32, Int32, Int32, Int32, Int32, npt.NDArray[np.uint8]]:
    """(slots, generations, starts, counts, tokens, samples). raises ShapeMismatch where they disagree"""
    slots, generations, starts, counts, tokens = (
        np.frombuffer(column, dtype=np.int32)
        for column in (step.slots, step.generations, step.starts, step.counts, step.tokens)
    )
    samples = np.frombuffer(step.samples, dtype=np.uint8)
    sizes = (slots.size, generations.size, starts.size, counts.size, samples.size)
    if len(set(sizes)) != 1:
        raise ShapeMismatch(f"step {step.epoch}: columns slots to samples hold {sizes} entries")
    if int(counts.sum()) != tokens.size or (counts.size and counts.min() < 1):
        raise ShapeMismatch(f"step {step.epoch}: counts {counts.tolist()} against {tokens.size} tokens")
    return slots, generations, starts, counts, tokens, samples


def _check_agreed(step: RunStep, live: int, agreed: int) -> None:
    """raises ShapeMismatch where the rows of this rank aren't what the ranks agreed on"""
    # A step that verifies has fewer rows where requests had ended: never more than its peers make room for.
    fits = live <= agreed if step.verify else live == agreed
    if not fits:
        raise ShapeMismatch(f"step {step.epoch}: {live} tokens, but the ranks agreed on {agreed}")
