"""A rank's drafting: the draft model with its state, what it is fed from, how many drafts are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.actors.round import Bind, Injected, Round
from engine.memory.pools import KVState
from engine.messages import SlotBind
from engine.model.config import ModelConfig
from engine.model.draft import Choose, Drafted, Drafter, DraftRows, InjectRows
from engine.model.draft_ring import DraftState
from engine.model.group_stats import GroupStats
from engine.runner.columns import Int, Upload
from engine.runner.correction import Correction
from engine.runner.layout import verify_lens
from engine.runner.masking import NO_GROUPS, Guide
from engine.runner.taps import TAP_ROWS, TapRing

VerifyMode = Literal["static", "cap-accept", "compact"]

VERIFY_MODES: tuple[VerifyMode, ...] = ("static", "cap-accept", "compact")


def slot_bytes(drafter: Drafter, config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that drafting keeps for one request slot: draft KV and taps."""
    taps = len(drafter.taps) * TAP_ROWS * config.hidden_size * dtype.itemsize
    tokens = TAP_ROWS * torch.int64.itemsize if drafter.needs_next_tokens else 0
    return _bytes_of(drafter.new_state(1)) + taps + tokens


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of n groups. A draft that holds NaN is worthless: its group verifies its anchor alone.

    ids       [n, gamma] int64
    survival  [n, gamma] float32 on the host, 0 where the draft is worthless
    usable    [n] bool on the host
    logits    [n, gamma, V] float32, None where no group samples
    worth     int64 [n], rows in front of a grammar's end, behind which nothing is kept; None: no grammar
    stats     of the logits, where the choosing left them
    """

    ids: Tensor
    survival: Tensor
    usable: npt.NDArray[np.bool_]
    logits: Tensor | None
    worth: Int | None = None
    stats: GroupStats | None = None


class Speculation:
    """Drafter, its KV, the tap ring, what was committed of each slot, and the way in which drafts are cut.

    mode   static verifies and accepts all that may be; cap-accept verifies all and accepts the scheduled
           prefix; compact verifies the scheduled prefix
    """

    def __init__(self, drafter: Drafter, state: KVState, mode: VerifyMode) -> None:
        self.drafter, self.mode = drafter, mode
        self.state = drafter.new_state(state.slots)
        self.round, self.correction = Round(state.slots), Correction()
        self.ring = TapRing(
            state.slots,
            len(drafter.taps),
            state.config.hidden_size,
            state.device,
            state.dtype,
            keep_tokens=drafter.needs_next_tokens,
        )
        self._to = Upload(state.device)

    @property
    def block(self) -> int:
        """Tokens of a draft."""
        return self.drafter.block

    @property
    def bytes(self) -> int:
        """Memory of drafting, all slots together."""
        return _bytes_of(self.state) + self.ring.bytes

    def bind(self, bind: SlotBind) -> None:
        """A slot has a new request: nothing of the former one is ever looked at."""
        self.round.receive(Bind(bind.slot, bind.generation, ends_at=bind.ends_at))
        self.ring.bind(bind.slot, 0)

    def forget(self) -> None:
        """What became of drafts so far doesn't count: warm-up and measurement have random prompts."""
        self.correction = Correction()

    def inject(self, slots: Int, anchors: Tensor) -> None:
        """Gives the draft the committed rows of `slots` [n] that it hasn't seen; anchors int64 [n]."""
        ends = self.round.lengths[slots]
        begins = np.maximum(self.round.injected[slots], ends - TAP_ROWS)
        waiting = self.ring.take(slots, begins, ends, anchors)
        if waiting is not None:
            where = self._to.int64(np.stack([waiting.slots, waiting.positions]))
            rows = InjectRows(where[0], where[1], waiting.next_tokens)
            self.drafter.inject(self.state, rows, waiting.taps)
            self.round.receive(Injected(slots, begins, ends - begins))

    def draft(
        self, slots: Int, anchors: Tensor, choose: Choose, guide: Guide | None = None, *, keep_logits: bool
    ) -> Drafts:
        """Drafts for `slots` [n] whose waiting rows were injected; waits for the survival on the host.

        guide  keeps drafts to what the grammars of these slots allow
        """
        rows = DraftRows(slots, self.round.lengths[slots], self.ring.valid_from[slots], anchors)
        if guide is not None:
            # Who looks at a position's logits again must find them masked.
            choose = guide.guided(_unmasked(choose) if self.drafter.rereads_logits else choose)
        drafted = self.drafter.draft(self.state, rows, choose, keep_logits=keep_logits)
        survival = drafted.survival
        if drafted.logits is not None:
            survival = torch.where(_largest(drafted, drafted.logits).isfinite(), survival, torch.nan)
        survival = survival.cpu()
        usable = np.isfinite(survival.numpy()).all(1)
        certain, guided = (None, NO_GROUPS) if guide is None else (guide.certain(), guide.places)
        survival = self.correction.survival(survival.numpy(), certain, guided)
        ids = drafted.ids
        if not usable.all():
            worthless = self._to.tensor(~usable)[:, None]
            # Tokens drawn from NaN may be no tokens at all.
            ids = ids.masked_fill(worthless, 0)
            survival = survival.masked_fill(torch.from_numpy(~usable)[:, None], 0.0)
        worth = None if guide is None else guide.worth()
        return Drafts(ids, survival, usable, drafted.logits, worth, drafted.stats)

    def layout(self, drafts: Drafts, caps: Int, budget: int) -> tuple[Int, Int]:
        """(rows that each group runs, rows of it that may be accepted), both int64 [n].

        caps    most rows of each group, its anchor included
        budget  as in RunStep
        """
        caps = np.where(drafts.usable, caps, np.minimum(caps, 1))
        if drafts.worth is not None:
            caps = np.minimum(caps, drafts.worth)
        lens = verify_lens(drafts.survival, caps, -1 if self.mode == "static" else budget)
        return (caps if self.mode == "cap-accept" else lens), lens


def _unmasked(choose: Choose) -> Choose:
    """The same choice, that can't read masks itself."""
    return lambda k, z: choose(k, z)


def _largest(drafted: Drafted, logits: Tensor) -> Tensor:
    """The largest of each draft's logits [n, gamma, V], [n, gamma]; not finite where one is no number.

    Tokens that a draft rules out don't disturb it.
    """
    if drafted.stats is None:
        return logits.amax(-1)
    return drafted.stats.tops.amax(-1).view(logits.shape[1], -1).t()


def _bytes_of(state: DraftState) -> int:
    parts = (state.pool,) if state.carried is None else (state.pool, state.carried)
    return sum(part.numel() * part.element_size() for part in parts)
