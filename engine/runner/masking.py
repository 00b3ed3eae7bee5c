"""Grammar masks of a step's logits: asked for before the target runs, applied before tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.messages import SlotBind
from engine.model.draft import Choose
from engine.runner.answers import BAD_LOGITS, Outcome
from engine.runner.columns import Int
from engine.runner.edits import MaskWords

OVER = -1
"""Instead of a length: the grammar had ended before the step."""

NOTHING_ALLOWED = (
    "the grammar, the logit bias and the minimum length together allow no token, or the logits hold NaN or "
    "infinity"
)

NO_GROUPS: Int = np.zeros(0, np.int64)


class MaskGroups(NamedTuple):
    """Groups whose rows choose tokens: those that are verified, then those that are sampled.

    slots    int64 [n]
    anchors  int64 [n], tokens that each has behind its first row's choice, the row's own included
    widths   int64 [n], rows of each: verified ones; 1 of sampled groups
    tokens   int64 [verified groups, gamma + 1] on the device, anchor and drafts
    """

    slots: Int
    anchors: Int
    widths: Int
    tokens: Tensor


class Masks(NamedTuple):
    """The masks of a step.

    words    of the rows of all groups, group by group
    lengths  int64 [m] of the constrained groups: tokens behind their matchers; OVER: the grammar had ended
    most     int64 [m], rows that each may keep: those up to the token that ends its grammar
    failed   why a constrained group fails, by its number among them; its rows allow nothing
    """

    words: MaskWords
    lengths: Int
    most: Int
    failed: Mapping[int, str]


class Guide(Protocol):
    """The masks of a step's drafts, made while the drafts are made: n groups, gamma drafts.

    places  int64, groups whose drafts are masked
    """

    places: Int

    def guided(self, choose: Choose) -> Choose:
        """`choose`, among tokens that the grammars allow.

        The others' logits become minus infinity, but for a ChooseAmong, which may leave them as they are.
        Waits at each position for the tokens of the one before it, on which its masks depend.
        """

    def worth(self) -> Int:
        """int64 [n], once all is drafted: rows in front of a grammar's end, behind which nothing is kept."""

    def certain(self) -> npt.NDArray[np.bool_]:
        """[n, gamma], once all is drafted: drafts that are the only token allowed behind those before."""


class MaskSource(Protocol):
    """Where masks come from. All calls are the device thread's; `finish`, `wait_read`, guided choices wait.

    A step that has constrained groups calls `begin`, `finish` and `retain`, once each and in this order;
    where it drafts, `guide` before them.
    """

    def guide(self, epoch: int, slots: npt.NDArray[np.integer], anchors: Int) -> Guide | None:
        """Masks of drafts for these slots [n] will be wanted; anchors int64 [n], as in MaskGroups.

        None: no slot has a grammar.
        """

    def bind(self, bind: SlotBind) -> str:
        """A slot has a new request, constrained or not. Returns why it can't be masked; empty: it can."""

    def wait_read(self, mask_slot: int) -> None:
        """Waits until the device has read what `mask_slot` held."""

    def begin(self, epoch: int, mask_slot: int, groups: MaskGroups) -> None:
        """Masks of these groups will be wanted."""

    def constrained(self, slots: npt.NDArray[np.integer]) -> Int:
        """Which of these slots have a grammar: places, int64, ascending."""

    def finish(self, epoch: int) -> Masks:
        """The masks, behind which the device's work may be queued."""

    def retain(self, epoch: int, tokens: Sequence[Sequence[int]]) -> list[bool]:
        """What each constrained group keeps, and with it whether its grammar has ended."""


class StepMasks:
    """The masks of one step; without constrained groups, of nothing.

    groups  RunStep's numbers of the constrained groups, int64 [m]
    found   once `finish` was called
    """

    def __init__(
        self,
        source: MaskSource | None = None,
        epoch: int = 0,
        mask_slot: int = 0,
        names: Int = NO_GROUPS,
        groups: MaskGroups | None = None,
    ) -> None:
        """names  RunStep's numbers of all groups."""
        self._source, self._epoch = source, epoch
        self._places = self.groups = NO_GROUPS
        self.found: Masks | None = None
        if source is None or groups is None:
            return
        self._places = source.constrained(groups.slots)
        if self._places.size:
            self.groups = names[self._places]
            self._widths = groups.widths
            source.begin(epoch, mask_slot, groups)

    def finish(self) -> None:
        """Waits for the masks, behind which the device's work may be queued."""
        if self.groups.size:
            assert self._source is not None
            self.found = self._source.finish(self._epoch)

    def of(self, first: int, count: int) -> MaskWords | None:
        """The masks of some of the rows that choose tokens; None: of none of them."""
        return None if self.found is None else self.found.words.part(first, first + count)

    @property
    def over(self) -> Int:
        """RunStep's numbers of groups whose grammar had ended before the step."""
        return NO_GROUPS if self.found is None else self.groups[self.found.lengths == OVER]

    def most(self, verified: int) -> Int | None:
        """Rows that each of the verified groups may keep, int64; None: all."""
        if self.found is None:
            return None
        most = self._widths[:verified].copy()
        own = self._places < verified
        most[self._places[own]] = self.found.most[own]
        return most

    def retain(self, outcome: Outcome, groups: int) -> bytes:
        """Tells the matchers what the step keeps, and names what failed. Returns `StepDone.ended`."""
        if self.found is None:
            return b""
        assert self._source is not None
        tokens: list[Sequence[int]] = []
        for number, (group, length) in enumerate(
            zip(self.groups.tolist(), self.found.lengths.tolist(), strict=True)
        ):
            if number in self.found.failed:
                outcome.drop(group)
                outcome.failed[group] = self.found.failed[number]
            elif outcome.failed.get(group) == BAD_LOGITS:
                outcome.failed[group] = NOTHING_ALLOWED
            tokens.append(() if length == OVER else outcome.tokens.get(group, ()))
        ended = self._source.retain(self._epoch, tokens)
        if not any(ended):
            return b""
        column = np.zeros(groups, np.uint8)
        column[self.groups[ended]] = 1
        return column.tobytes()


def no_drafts(device: torch.device) -> Tensor:
    """`MaskGroups.tokens` of a step that verifies nothing."""
    return torch.zeros(0, 1, dtype=torch.int64, device=device)
