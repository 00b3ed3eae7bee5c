"""The order of one device step with speculation, and what is committed of each slot.

The step runner drives it on the device thread, with `receive`, whether or not a step drafts; an event out of
order, or with columns that break a rule, raises Unexpected. In brackets: where the step has it.

  Bind        for each of RunStep.binds, before anything else
  Begin       columns of the step; afterwards `caps` are the most rows that each group may verify, and
              `lengths` of its slots the positions of its anchors
  [Injected]  what waits in the tap rings of slots that draft; none waits: not fired
  [Drafted]   only where the step drafts (budget other than 0)
  LaidOut     rows of each group, `verify_lens(survival, round.caps, budget)`, and all rows of chunks
  [MaskRead]  no mask slot is free: the runner has waited until the oldest one was read
  [MaskBegun] `open_mask_slot`, and places of the groups whose next tokens a grammar constrains
  Verified    behind the target forward
  [MaskReady] lengths at which the matchers stood; -1: it has ended, and nothing more is kept of the group.
              Afterwards `most` are the rows that each group may keep
  Accepted    rows that each group keeps: accepted drafts and 1, 0 where it may keep none; chunks all
  [MaskRead]  as soon as nothing reads the masks any more
  Committed   behind `commit_step`; the lengths have grown
  [Failed]    any exception of the step, before it is raised on

Nothing here holds a tensor or reads a clock. B is the groups of the step; columns of slots are int64[slots].
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.actors.core import Core

# Several times faster on short columns than `.all()` and `.any()`.
count_nonzero = np.count_nonzero

NO_END = np.iinfo(np.int64).max
MASK_SLOTS = 2
"""One is filled while the other one is read."""
UNBOUND = ENDED = -1


class Bind(NamedTuple):
    """A slot is (re)bound. length: tokens that its caches have (a prefix hit); ends_at: as in SlotBind."""

    slot: int
    generation: int
    length: int = 0
    ends_at: int = 0


class Begin(NamedTuple):
    """A step. `rows`: most rows of all groups, as the ranks agreed for this one.

    slots, generations  int[B], as in RunStep
    chunks              int[B], rows of a prompt's chunk; 0: a decode group
    caps                int[B], RunStep.verify
    """

    epoch: int
    slots: NDArray[Any]
    generations: NDArray[Any]
    chunks: NDArray[Any]
    caps: NDArray[Any]
    rows: int


class Injected(NamedTuple):
    """Rows first..first+rows-1 of these slots are in the draft's ring; each slot once, int[n] each."""

    slots: NDArray[Any]
    first: NDArray[Any]
    rows: NDArray[Any]


class Drafted(NamedTuple):
    """The drafts are there."""


class LaidOut(NamedTuple):
    """Rows of each group, int[B]."""

    lens: NDArray[Any]


class MaskBegun(NamedTuple):
    """The mask source fills this mask slot; places: of the groups that are masked, int[M]."""

    mask_slot: int
    places: NDArray[Any]


class Verified(NamedTuple):
    """The logits are there."""


class MaskReady(NamedTuple):
    """Masks of this epoch. lengths int[M]: tokens, prompt included, behind each matcher; -1: it has ended."""

    epoch: int
    lengths: NDArray[Any]


class MaskRead(NamedTuple):
    """Nothing reads this mask slot any more."""

    mask_slot: int


class Accepted(NamedTuple):
    """Rows kept of each group, int[B]; failed: places of groups whose logits or sampling failed, int[n]."""

    kept: NDArray[Any]
    failed: NDArray[Any] | None = None


class Committed(NamedTuple):
    """What is kept is in place."""


class Failed(NamedTuple):
    """The step raised."""


class Round(Core):
    """What the device knows of its slots, and of the step in hand.

    slots  of the cache, slot 0 included

    generations, lengths, injected, ends_at  by slot: as bound; committed positions; positions before this one
                 are in the draft's ring or were passed over; tokens at the longest
    mask_owners  epoch of the step that fills or reads each mask slot; None: free
    epoch        of the step in hand, or the last one
    caps         int64[B] most rows of decode groups, anchor included; 0 for chunks
    least, most  int64[B] rows that each group must and may verify; later, that it must and may keep
    """

    SPEC = "round"
    MESSAGES = sys.modules[__name__]
    DATA: ClassVar[tuple[str, ...]] = (
        *("generations", "lengths", "injected", "ends_at", "mask_owners", "epoch", "caps"),
        *("slots", "chunks", "least", "most", "rows", "masked", "kept"),
    )

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.generations = np.full(slots, UNBOUND, np.int64)
        self.lengths = np.zeros(slots, np.int64)
        self.injected = np.zeros(slots, np.int64)
        self.ends_at = np.full(slots, NO_END)
        self.mask_owners: list[int | None] = [None] * MASK_SLOTS
        self.epoch = 0
        self._take_in(Begin(0, *(np.zeros(0, np.int64),) * 4, rows=0))

    @property
    def open_mask_slot(self) -> int:
        """A mask slot that nobody fills or reads; -1 where there is none."""
        return self.mask_owners.index(None) if None in self.mask_owners else -1

    # -- a step begins -------------------------------------------------------------------------

    def bind(self, msg: Bind) -> None:
        """The slot is another request's; nothing of the one before is left."""
        self.generations[msg.slot] = msg.generation
        self.lengths[msg.slot] = self.injected[msg.slot] = msg.length
        self.ends_at[msg.slot] = msg.ends_at or NO_END

    def names_bound_slots(self, msg: Begin) -> bool:
        """Every group's slot is bound to its generation."""
        return not count_nonzero(self.generations[msg.slots] != msg.generations)

    def begin(self, msg: Begin) -> None:
        """Least and most rows of each group; a request that has ended on the device gets none."""
        self._take_in(msg)

    def _take_in(self, msg: Begin) -> None:
        self.epoch, self.slots, self.chunks, self.rows = msg.epoch, msg.slots, msg.chunks, msg.rows
        left = self.ends_at[msg.slots] - self.lengths[msg.slots] - 1
        self.caps = np.maximum(np.minimum(msg.caps, left), 0)
        self.least = np.minimum(self.caps, 1) + msg.chunks
        self.most = self.caps + msg.chunks
        self.masked = self.kept = np.zeros(0, np.int64)

    # -- draft ---------------------------------------------------------------------------------

    def injects_waiting_rows(self, msg: Injected) -> bool:
        """In order, at most once, committed ones alone, and all up to the anchor."""
        again = count_nonzero(msg.first < self.injected[msg.slots])
        return not again and not count_nonzero(msg.first + msg.rows != self.lengths[msg.slots])

    def note_injected(self, msg: Injected) -> None:
        """Rows that were passed over are never injected either."""
        self.injected[msg.slots] = msg.first + msg.rows

    def sees_all_context(self, msg: Drafted) -> bool:
        """A group whose drafts may be verified has drafted with everything committed in its ring."""
        behind = self.injected[self.slots] < self.lengths[self.slots]
        return not count_nonzero(behind & (self.caps > 1))

    # -- verify --------------------------------------------------------------------------------

    def lays_out_plain_rows(self, msg: LaidOut) -> bool:
        """Without drafts: one row of each decode group that has any left, all rows of chunks."""
        return not count_nonzero(msg.lens != self.least)

    def lays_out_allowed_rows(self, msg: LaidOut) -> bool:
        """At least the anchor, at most what may be kept, and no more rows than the ranks agreed on."""
        lens = msg.lens
        outside = count_nonzero(lens < self.least) or count_nonzero(lens > self.most)
        return not outside and int(lens.sum()) <= self.rows

    def lay_out(self, msg: LaidOut) -> None:
        """At most what is verified is kept."""
        self.most = msg.lens

    def mask_slot_is_free(self, msg: MaskBegun) -> bool:
        """I5."""
        return self.mask_owners[msg.mask_slot] is None

    def hold_mask_slot(self, msg: MaskBegun) -> None:
        """Filled for this step, then read by it."""
        self.mask_owners[msg.mask_slot] = self.epoch
        self.masked = msg.places

    def matchers_stood_at_the_anchors(self, msg: MaskReady) -> bool:
        """I1: each had every token behind it, and none twice, when its draft was traversed."""
        known = self.lengths[self.slots[self.masked]] + np.maximum(self.chunks[self.masked], 1)
        if msg.epoch != self.epoch or msg.lengths.shape != known.shape:
            return False
        return not count_nonzero((msg.lengths != known) & (msg.lengths != ENDED))

    def note_ends(self, msg: MaskReady) -> None:
        """I6: of a group whose grammar has ended nothing more is kept."""
        over = self.masked[msg.lengths == ENDED]
        if over.size:
            self.least, self.most = self.least.copy(), self.most.copy()
            self.least[over] = self.most[over] = 0

    def mask_slot_was_held(self, msg: MaskRead) -> bool:
        """Freed once."""
        return self.mask_owners[msg.mask_slot] is not None

    def free_mask_slot(self, msg: MaskRead) -> None:
        """The next step that needs one may fill it."""
        self.mask_owners[msg.mask_slot] = None

    # -- keep ----------------------------------------------------------------------------------

    def keeps_verified_rows(self, msg: Accepted) -> bool:
        """At least the anchor, but where sampling failed; at most what was verified; chunks whole."""
        least = self.least
        if msg.failed is not None:
            least = least.copy()
            least[msg.failed] = 0
        return not count_nonzero(msg.kept < least) and not count_nonzero(msg.kept > self.most)

    def note_kept(self, msg: Accepted) -> None:
        """Committed next."""
        self.kept = msg.kept

    def commit(self, msg: Committed) -> None:
        """Each kept row counts once."""
        self.lengths[self.slots] += self.kept

    # -- invariants ----------------------------------------------------------------------------

    def injected_is_committed(self) -> bool:
        """RD1."""
        return bool((self.injected <= self.lengths).all())

    def nothing_beyond_the_end(self) -> bool:
        """RD2: the anchor behind the committed positions is a token, too."""
        return bool((self.lengths < self.ends_at).all())

    def mask_slots_have_one_reader(self) -> bool:
        """RD3."""
        held = [owner for owner in self.mask_owners if owner is not None]
        return len(set(held)) == len(held)
