"""Changes to logits before a temperature is applied: logit bias, penalties, minimum length, grammar mask.

They work on groups of adjacent rows: a group is one request, and its row i chooses the token at the group's
position plus i, under the assumption that the first i drafted tokens were emitted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels import cpu_masks
from engine.runner.columns import Int, Upload
from engine.runner.parameters import REPETITION, Features, SlotParameters
from engine.runner.penalties import TokenCounts

GrammarMask = Callable[[Tensor], None]
"""Sets forbidden tokens of logits [R, V] to minus infinity, in place."""

BYTE_BITS = 8


@dataclass(frozen=True, slots=True)
class MaskWords:
    """The GrammarMask of some rows as bits, for who can read them while editing.

    words  int32 [n, ceil(V / 32)] on the device; bit t % 32 of word t // 32 is 1 where token t is allowed
    rows   int64 [n] on the host, ascending: the row of the logits that each is for
    """

    words: Tensor
    rows: Int

    def __call__(self, logits: Tensor) -> None:
        """As GrammarMask."""
        forbid(logits, Upload(logits.device).int64(self.rows), self.words)

    def part(self, first: int, stop: int) -> MaskWords | None:
        """That of logits[first:stop]; None where no row of it is masked."""
        low, high = np.searchsorted(self.rows, (first, stop))
        return MaskWords(self.words[low:high], self.rows[low:high] - first) if low < high else None


class ChooseAmong(ABC):
    """A Choose that reads masks itself."""

    @abstractmethod
    def __call__(self, k: int, z: Tensor) -> Tensor:
        """As Choose."""

    @abstractmethod
    def among(self, k: int, z: Tensor, mask: MaskWords) -> Tensor:
        """As Choose, of tokens that the mask allows; the others' logits may become minus infinity."""


class Groups(NamedTuple):
    """Groups of rows, in the order of the rows.

    slots      the slot of each
    positions  position of the token that its first row chooses
    widths     rows of each, 0 or more
    features   of each slot
    """

    slots: Sequence[int]
    positions: Sequence[int]
    widths: Sequence[int]
    features: Sequence[Features]

    @property
    def edited(self) -> bool:
        """Whether a row chooses from other numbers than the model's own logits, a mask apart."""
        return any(f.edits_logits(p) for f, p in zip(self.features, self.positions, strict=True))

    @property
    def favoured(self) -> bool:
        """Whether each row chooses the greatest of the model's own logits, a mask apart."""
        return all(f.greedy for f in self.features) and not self.edited


def edit(
    parameters: SlotParameters,
    counts: TokenCounts,
    logits: Tensor,
    groups: Groups,
    mask: GrammarMask | None,
    draft_ids: Tensor | None = None,
) -> Tensor:
    """Edited logits, float32 [R, V]; the input itself where nothing asks for an edit.

    logits     float32 [R, V]; not changed
    draft_ids  int64 [groups, gamma], gamma + 1 at least the widest group; None where all widths are 1
    """
    if mask is None and not groups.edited:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    firsts = _firsts(groups.widths)
    for slot, first, width, features in zip(
        groups.slots, firsts, groups.widths, groups.features, strict=True
    ):
        if features.biased and width:
            ids, values = parameters.bias[slot]
            logits[first : first + width].index_add_(1, ids, values.expand(width, -1))
    penalised = [g for g, f in enumerate(groups.features) if f.penalised and groups.widths[g]]
    if penalised:
        _penalise(parameters, counts, logits, groups, penalised, draft_ids)
    for slot, position, first, width, features in zip(
        groups.slots, groups.positions, firsts, groups.widths, groups.features, strict=True
    ):
        early = min(features.stop_from - position, width)
        if early > 0:
            logits[first : first + early].index_fill_(1, parameters.stops[slot], float("-inf"))
    if mask is not None:
        mask(logits)
    return logits


def _penalise(
    parameters: SlotParameters,
    counts: TokenCounts,
    logits: Tensor,
    groups: Groups,
    penalised: Sequence[int],
    draft_ids: Tensor | None,
) -> None:
    """Penalties of the groups `penalised`; each row has seen the drafted tokens before it."""
    firsts, device = _firsts(groups.widths), logits.device
    cells = [(g, i) for g in penalised for i in range(groups.widths[g])]
    rows = torch.tensor([firsts[g] + i for g, i in cells], device=device)
    slots = [groups.slots[g] for g, _ in cells]
    factors = parameters.floats[torch.tensor(slots, device=device), REPETITION:]
    if draft_ids is None:
        counts.penalise(logits, rows, slots, factors)
        return
    group, ahead = (torch.tensor(column, device=device) for column in zip(*cells, strict=True))
    drafted = draft_ids[group]
    # A token outside the vocabulary is never accepted: no row behind it counts.
    before = torch.arange(drafted.shape[1], device=device) < ahead[:, None]
    known = before & (drafted >= 0) & (drafted < logits.shape[1])
    counts.penalise(logits, rows, slots, factors, torch.where(known, drafted, -1))


def _firsts(widths: Sequence[int]) -> list[int]:
    """First row of each group."""
    found, row = [], 0
    for width in widths:
        found.append(row)
        row += width
    return found


def forbid(logits: Tensor, index: Tensor, masks: Tensor) -> None:
    """Sets tokens whose bit is 0 to minus infinity, in rows `index` int64 [n] of logits [R, V].

    index  ascending
    masks  int32 [n, ceil(V / 32)], bit t % 32 of word t // 32 is token t
    """
    if masks.device.type == "cpu":
        cpu_masks.forbid(logits, index, masks)
        return
    # Words are little-endian, so that bit t % 8 of byte t // 8 is token t, too.
    bits = torch.arange(BYTE_BITS, dtype=torch.uint8, device=logits.device)
    banned = ((masks.view(torch.uint8)[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]] == 0
    if index.numel() == logits.shape[0]:
        logits.masked_fill_(banned, float("-inf"))
    else:
        own = logits.index_select(0, index).masked_fill_(banned, float("-inf"))
        logits.index_copy_(0, index, own)
