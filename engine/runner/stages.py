"""What the stages of a step with speculation hand on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.model.step import StepOutput
from engine.runner.answers import Wanted
from engine.runner.columns import Int
from engine.runner.masking import StepMasks
from engine.runner.plan import PlannedStep
from engine.runner.speculative import Drafts

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepColumns:
    """A RunStep's columns, integers [B]; tokens [T]; decodes bool [B].

    chunks  int64, counts of chunks, 0 for groups that decode
    verify  int64, 0 for chunks
    agreed  most rows of the step, as the ranks agreed
    """

    slots: Int32
    generations: Int32
    starts: Int32
    counts: Int32
    tokens: Int32
    decodes: npt.NDArray[np.bool_]
    chunks: Int
    verify: Int
    agreed: int


@dataclass(frozen=True, slots=True)
class Decoding:
    """The n row groups that verify something; those that had ended are left out.

    groups          int64 [n], number in the RunStep
    slots, lengths  int64 [n], committed length before the step
    caps            int64 [n], most rows that each may verify, at least 1
    """

    groups: Int
    slots: Int
    lengths: Int
    caps: Int


@dataclass(frozen=True, slots=True)
class Laid:
    """What a step runs.

    drafts  None where nothing was drafted: each group runs its anchor, and its next token is sampled
    rows    int64 [n], rows that each decoding group runs
    lens    int64 [n], how many of them are verified
    """

    drafts: Drafts | None
    rows: Int
    lens: Int


@dataclass(frozen=True, slots=True)
class Target:
    """The target's part of a step.

    names   int64, the RunStep's number of each of the batch's groups
    places  int64 [n], the batch's number of each decoding group that is judged
    masks   of the constrained groups
    """

    plan: PlannedStep
    out: StepOutput
    wanted: Wanted
    names: Int
    places: Int
    masks: StepMasks


@dataclass(frozen=True, slots=True)
class Kept:
    """What a step keeps.

    rows    int64 [B] of each of the RunStep's groups
    failed  int64, groups that keep nothing since their logits or sampling failed; None where none can
    lens    int64 on the device, rows of each of the batch's groups
    relays  (slots, tokens) for the relay, int64 on the device
    ended   as in StepDone
    """

    rows: Int
    failed: Int | None
    lens: Tensor
    relays: tuple[tuple[Tensor, Tensor], ...]
    ended: bytes
