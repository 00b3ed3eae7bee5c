"""Masks of a step with speculation: which rows want one, and a mask slot that nobody reads any more (I5)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.actors.round import MaskBegun, MaskRead, Round
from engine.runner.columns import Int
from engine.runner.masking import MaskGroups, MaskSource, StepMasks, no_drafts
from engine.runner.stages import Decoding, Laid, StepColumns


def begin_masks(
    source: MaskSource,
    round_: Round,
    columns: StepColumns,
    decoding: Decoding,
    laid: Laid,
    sampled: Int,
    anchors: Tensor,
) -> StepMasks:
    """Asks for the masks of what is judged and of what is sampled.

    sampled  int64, RunStep's numbers of groups whose last row is sampled
    anchors  int64 [n] on the device, token of each decoding group's first row
    """
    names, groups = _groups(round_, columns, decoding, laid, sampled, anchors)
    if not source.constrained(groups.slots).size:
        return StepMasks()
    if round_.open_mask_slot < 0:
        oldest = int(np.argmin(np.array(round_.mask_owners)))
        source.wait_read(oldest)
        round_.receive(MaskRead(oldest))
    mask_slot = round_.open_mask_slot
    masks = StepMasks(source, round_.epoch, mask_slot, names, groups)
    round_.receive(MaskBegun(mask_slot, masks.groups))
    return masks


def _groups(
    round_: Round, columns: StepColumns, decoding: Decoding, laid: Laid, sampled: Int, anchors: Tensor
) -> tuple[Int, MaskGroups]:
    """RunStep's numbers of all groups that choose tokens, and what masks need of them."""
    slots = columns.slots[sampled].astype(np.int64)
    ends = round_.lengths[slots] + np.maximum(columns.chunks[sampled], 1)
    ones = np.ones_like(sampled)
    if laid.drafts is None:
        return sampled, MaskGroups(slots, ends, ones, no_drafts(anchors.device))
    return np.append(decoding.groups, sampled), MaskGroups(
        np.append(decoding.slots, slots),
        np.append(decoding.lengths + 1, ends),
        np.append(laid.lens, ones),
        torch.cat([anchors[:, None], laid.drafts.ids], 1),
    )
