"""Measures what steps cost: real steps of so many requests that run so many rows, on a runner at rest.

Cells are visited in rounds, each cell once a round, so that whatever disturbs the machine for a while
disturbs all of them. A step that drafts verifies exactly the cell's rows, spread evenly over its
requests. Requests have different random prompts: rows that are alike would all go to the same experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.actors.schedule import smallest_at_least
from engine.config import PAGE_TOKENS
from engine.errors import DeviceFailed
from engine.messages import RunStep, Sampling, SlotBind, StepDone

Say = Callable[[str], None]

PROMPT_TOKENS, PROMPTS_AT_ONCE = 32, 16
LEAST_ROUNDS = 2
"""The first one packs weights and fills caches, and isn't counted."""

TOLD_PARTS = 4


class Cell(NamedTuple):
    """A step of `requests` decoding requests that runs `rows` rows, with drafts or without."""

    requests: int
    rows: int
    drafted: bool


class Measured(NamedTuple):
    """A cell and the seconds of its median step."""

    cell: Cell
    seconds: float


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    execute     runs a step, on the device thread
    block       drafted tokens of a round
    requests    that may decode at once: slots and pages there are
    vocab_size  of the model
    ranks       data-parallel ranks; each measures
    meets       steps of all ranks meet in collectives: then every rank must run the same steps
    captured    sizes in rows of captured steps, ascending; ranks that serve would agree on them
    """

    execute: Callable[[RunStep], StepDone]
    block: int
    requests: int
    vocab_size: int
    ranks: int = 1
    meets: bool = False
    captured: tuple[int, ...] = ()


def cells_of(requests: int, block: int, quick: bool = False) -> list[Cell]:
    """Powers of two up to `requests`, and that; of each the plain step, one drafted row, and whole drafts.

    quick  half drafts and whole ones in place of every width
    """
    counts = sorted({1 << power for power in range(requests.bit_length())} | {requests})
    widths = (block // 2, block) if quick else range(1, block + 1)
    return [
        cell
        for count in counts
        for cell in (
            Cell(count, count, False),
            *(Cell(count, rows, True) for rows in sorted({count + 1, *_rows(count, widths)})),
        )
    ]


def _rows(count: int, widths: Iterable[int]) -> list[int]:
    return [count * (1 + width) for width in widths if width]


def measure(
    run_cell: Callable[[Cell], float], cells: list[Cell], say: Say, budget_s: float | None, rounds: int = 0
) -> list[Measured]:
    """The median step of each cell, without its first one.

    run_cell  runs a cell's step and gives its seconds
    cells     by requests, ascending
    budget_s  LEAST_ROUNDS, and more until so many seconds are over; cells of more requests are left out where
              those before take too long for that. None: all cells, `rounds` times
    """
    began = time.perf_counter()
    taken_s: dict[Cell, list[float]] = {}
    for number, cell in enumerate(cells, 1):
        late = budget_s is not None and time.perf_counter() - began > budget_s / LEAST_ROUNDS
        if late and cell.requests > cells[number - 2].requests:
            say(f"costs of steps: {cell.requests} requests and more are left out, for want of time")
            break
        taken_s[cell] = [run_cell(cell)]
        if number * TOLD_PARTS // len(cells) != (number - 1) * TOLD_PARTS // len(cells):
            say(f"costs of steps: {number} of {len(cells)} cells run once")
    done = 1

    def goes_on() -> bool:
        if budget_s is None:
            return done < rounds
        passed_s = time.perf_counter() - began
        return done < LEAST_ROUNDS or passed_s * (done + 1) / done < budget_s

    while goes_on():
        for cell, times in taken_s.items():
            times.append(run_cell(cell))
        done += 1
    say(f"costs of steps: {len(taken_s)} cells, {done} rounds, {time.perf_counter() - began:.1f} s")
    return [Measured(cell, median(times[1:] or times)) for cell, times in taken_s.items()]


class Stage:
    """Requests on a runner, of which any first few take a step together.

    Slots 1 and up are bound here, each with one page of its own; whoever binds them next finds nothing of it.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._epoch = 0
        self._lengths = np.zeros(subject.requests, np.int64)
        self._bounds = np.full(
            subject.requests, PAGE_TOKENS
        )  # No rank's request is longer, whatever it accepts.
        self._draw = np.random.default_rng(1)

    def run_cell(self, cell: Cell) -> float:
        """Runs one step of this cell; its seconds on the device thread.

        raises  DeviceFailed where the step didn't run as many rows as it was told to
        """
        self._refresh(cell.requests)
        each, more = divmod(cell.rows, cell.requests)
        caps = np.full(cell.requests, each)
        caps[:more] += 1
        lengths = self._lengths[: cell.requests]
        # A step with the budget of a probe or more drafts; the bounds alone say how many rows are verified.
        done = self._step(
            lengths, np.ones_like(lengths), np.full(cell.requests, -1), caps, budget=-1 if cell.drafted else 0
        )
        rows = sum(done.verified)
        if rows != cell.rows or done.failed:
            raise DeviceFailed(f"a step of {cell} ran {rows} rows; failed groups: {done.failed}")
        return done.seconds

    def _refresh(self, requests: int) -> None:
        """New prompts for requests whose page could overflow in this step, and for those without one."""
        width = self.subject.block + 1
        stale = np.flatnonzero(self._bounds[:requests] + width > PAGE_TOKENS)
        for begin in range(0, stale.size, PROMPTS_AT_ONCE):
            slots = stale[begin : begin + PROMPTS_AT_ONCE] + 1
            prompts = self._draw.integers(0, self.subject.vocab_size, slots.size * PROMPT_TOKENS)
            counts = np.full(slots.size, PROMPT_TOKENS)
            self._step(counts * 0, counts, prompts, counts * 0, slots=slots)
            self._bounds[slots - 1] = PROMPT_TOKENS
        self._bounds[:requests] += width

    def _step(
        self,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        caps: npt.NDArray[np.int64],
        budget: int = 0,
        slots: npt.NDArray[np.int64] | None = None,
    ) -> StepDone:
        """One step of slots from 1 on, or of those to be bound."""
        self._epoch += 1
        binds: tuple[SlotBind, ...] = ()
        pages = b""
        if slots is None:
            slots = np.arange(1, starts.size + 1)
        else:
            sampling = Sampling(max_new_tokens=PAGE_TOKENS, ignore_eos=True)
            binds = tuple(SlotBind(slot, 0, slot, 0, sampling, PROMPT_TOKENS) for slot in slots.tolist())
            pages = _int32(np.stack([slots, slots * 0, slots, slots], axis=1))
        rows = int(np.where(caps > 0, caps, counts).sum())
        logits = int(np.maximum(caps, 1).sum())
        done = self.subject.execute(
            RunStep(
                epoch=-1 - self._epoch,
                mode="extend" if binds else "decode",
                slots=_int32(slots),
                generations=_int32(slots * 0),
                starts=_int32(starts),
                counts=_int32(counts),
                tokens=_int32(tokens),
                samples=b"\1" * slots.size,
                pages=pages,
                binds=binds,
                bucket=0 if binds else smallest_at_least(rows, self.subject.captured),
                ranks=((slots.size if not binds else -1, rows, logits),) * self.subject.ranks,
                verify=caps.astype(np.uint8).tobytes(),
                budget=budget,
            )
        )
        self._lengths[slots - 1] = np.frombuffer(done.lengths, np.int32)
        return done


def _int32(values: npt.NDArray[np.int64]) -> bytes:
    return values.astype(np.int32).tobytes()
