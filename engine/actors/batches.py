"""A planned step: its rows in the request table, the rank's wants of it, the RunStep for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.actors.requests import Requests
from engine.actors.schedule import IDLE, MODES, Column, Decision, Graphs, Rows, Want, loads, mode_of
from engine.actors.speculation import Drafting
from engine.messages import RunStep, Sampling, SlotBind

RELAY = -1
"""Token id that stands for the last token that the device sampled in the slot."""


@dataclass(slots=True, eq=False)
class Batch:
    """One planned step: rows of the request table, int64[B] columns beside them, and its message.

    starts    where the rows begin; of decode rows with drafts in flight before them, at most
    samples   uint8[B]: 1 where the last position of the row is sampled
    most      int64[B]: tokens that the row may gain; `samples` where nothing is drafted
    decodes   how many rows, the first ones, decode; the others are chunks of prompts
    drafting  what was decided of drafts; None: the rank doesn't speculate
    """

    rows: Rows
    starts: Column
    counts: Column
    samples: NDArray[np.uint8]
    most: Column
    decodes: int
    want: Want
    step: RunStep
    drafting: Drafting | None = None

    @property
    def ends(self) -> Column:
        """Positions of each row that are computed after the step; meaningful for rows with exact starts."""
        return self.starts + self.counts


@dataclass(slots=True, eq=False)
class Riders:
    """Who the planner has chosen for a step so far.

    decodes   rows that gain a token, or several
    caps      int64 by decode row: most rows that it may verify, its anchor included
    chunks    (row, first position, end) of prompt chunks
    entries   (slot, logical page, full page, window page): new entries of page tables
    bound     rows that got their slot in this step
    drafting  as in Batch
    """

    decodes: Rows
    caps: Column
    chunks: list[tuple[int, int, int]]
    entries: list[tuple[int, int, int, int]]
    bound: list[int]
    drafting: Drafting | None = None

    @property
    def empty(self) -> bool:
        """Nobody rides."""
        return not self.chunks and not self.decodes.size


def no_riders() -> Riders:
    """Nobody yet."""
    return Riders(np.zeros(0, np.intp), np.zeros(0, np.int64), [], [], [])


def idle_batch(epoch: int, want: Want) -> Batch:
    """The batch of a rank that has nothing to run and takes part nevertheless (I9)."""
    none = np.zeros(0, np.int64)
    step = RunStep(epoch, MODES[IDLE], b"", b"", b"", b"", b"", b"")
    return Batch(none.astype(np.intp), none, none, none.astype(np.uint8), none, 0, want, step)


def agreed(batch: Batch, wants: Sequence[Want], decision: Decision, speculates: bool) -> RunStep:
    """The batch's step with what all ranks have agreed on; a single rank has nothing to agree on."""
    if len(wants) == 1 and not decision.bucket:
        return batch.step
    return msgspec.structs.replace(batch.step, bucket=decision.bucket, ranks=loads(wants, speculates))


def assemble(requests: Requests, epoch: int, riders: Riders, graphs: Graphs) -> Batch:
    """The batch of riders, of whom there are some; their rows count as in flight from now on."""
    chunks = np.array(riders.chunks, np.int64).reshape(-1, 3)
    decodes, drafting = riders.decodes, riders.drafting
    rows = np.concatenate([decodes, chunks[:, 0]]).astype(np.intp)
    starts = requests.planned[rows]
    counts = np.concatenate([np.ones(decodes.size, np.int64), chunks[:, 2] - chunks[:, 1]])
    samples = (starts + counts >= requests.feed_to[rows]).astype(np.uint8)
    most = samples.astype(np.int64)
    most[: decodes.size] = riders.caps
    # A decode row's input is known to the host exactly if no step in flight is about to sample it.
    inputs = np.where(requests.due[decodes] == 0, requests.last_token[decodes], RELAY)
    fed = [requests.tokens[row][start:end].tobytes() for row, start, end in riders.chunks]
    slots = requests.held.slot[rows]
    mode = mode_of(decodes.size, len(chunks))
    step = RunStep(
        epoch=epoch,
        mode=MODES[mode],
        slots=_int32(slots),
        generations=_int32(requests.held.generations[slots]),
        starts=_int32(starts),
        counts=_int32(counts),
        tokens=_int32(inputs) + b"".join(fed),
        samples=samples.tobytes(),
        pages=np.array(riders.entries, np.int32).tobytes(),
        binds=tuple([_bind(requests, row, drafting is not None) for row in riders.bound]),
        verify=b"" if drafting is None else _verify(riders, rows.size),
        budget=0 if drafting is None else drafting.budget,
    )
    # The last token of a request is never computed.
    requests.planned[decodes] = np.minimum(
        starts[: decodes.size] + riders.caps, requests.ends_at[decodes] - 1
    )
    requests.planned[chunks[:, 0]] = chunks[:, 2]
    requests.in_flight[rows] += 1
    requests.due[rows] += samples
    requests.most_due[rows] += most
    want = _want(requests, rows, counts, samples, mode, graphs)
    if drafting is not None:
        want = want._replace(
            tokens=want.tokens + drafting.drafts, logit_rows=want.logit_rows + drafting.drafts
        )
    return Batch(rows, starts, counts, samples, most, decodes.size, want, step, drafting)


def _verify(riders: Riders, groups: int) -> bytes:
    column = np.zeros(groups, np.uint8)
    column[: riders.caps.size] = riders.caps
    return column.tobytes()


def _want(
    requests: Requests, rows: Rows, counts: Column, samples: NDArray[np.uint8], mode: int, graphs: Graphs
) -> Want:
    tokens = int(counts.sum())
    extends = mode != mode_of(rows.size, 0)
    # Rows with prompt logprobs need the logits of all their positions.
    logit_rows = int(np.where(requests.echoes[rows] != 0, counts, samples).sum())
    fits = not extends or tokens <= max(graphs.prefill, default=0)
    return Want(
        tokens=tokens,
        logit_rows=logit_rows,
        has_extend=int(extends),
        two_batches=0,
        mode=mode,
        prefill_graph=int(fits),
    )


def _bind(requests: Requests, row: int, speculates: bool) -> SlotBind:
    submit = requests.submit_of(row)
    slot = int(requests.held.slot[row])
    return SlotBind(
        slot=slot,
        generation=int(requests.held.generations[slot]),
        request_id=submit.request_id,
        child=submit.child,
        sampling=submit.sampling,
        prompt_tokens=int(requests.prompt[row]),
        prompt=requests.tokens[row].tobytes() if _reads_prompt(submit.sampling) else b"",
        ends_at=int(requests.ends_at[row]) if speculates else 0,
        constrained=bool(submit.grammar),
    )


def _reads_prompt(sampling: Sampling) -> bool:
    """Whether the device needs the tokens themselves: for penalties or prompt logprobs."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
        or sampling.prompt_logprobs >= 0
    )


def _int32(column: NDArray[np.int64]) -> bytes:
    return column.astype(np.int32).tobytes()
