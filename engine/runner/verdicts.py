"""What the target's logits make of the verified rows: how many stay, what is emitted, who fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runner.acceptance import Accepted
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.answers import BAD_LOGITS, Outcome
from engine.runner.choices import Choices
from engine.runner.columns import Int, Upload
from engine.runner.edits import MaskWords


@dataclass(frozen=True, slots=True)
class Verdict:
    """What n groups commit: as many rows as they emit tokens, and nothing where a group failed.

    counts     int64 [n] on the device; committed the same on the host
    last       int64 [n] on the device, each group's last token; any where its count is 0
    """

    counts: Tensor
    committed: Int
    last: Tensor


def judge(
    choices: Choices,
    logits: Tensor,
    rows: VerifyRows,
    groups: Sequence[int],
    outcome: Outcome,
    most: Int | None = None,
    mask: MaskWords | None = None,
) -> Verdict:
    """Accepts and waits for it; what became of `groups`, the RunStep's numbers, is added to `outcome`.

    logits  float32 [sum of verify_lens, V]
    most    int64 [n], tokens that each may emit, as its grammar ends with the last of them; None: all
    mask    of the logits' rows; None: nothing is forbidden
    """
    accepted, errors = _accept(choices, logits, rows, mask)
    counts = torch.where(accepted.valid, accepted.counts, 0)
    if most is not None:
        counts = counts.minimum(Upload(counts.device).int64(most))
    last = accepted.tokens.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0]
    committed, *columns = torch.cat([counts[None], accepted.tokens.T]).cpu().numpy()
    first_rows = (np.cumsum(rows.verify_lens) - rows.verify_lens).tolist()
    tokens = np.stack(columns, 1).tolist()
    for place, (group, count) in enumerate(zip(groups, committed.tolist(), strict=True)):
        if count:
            outcome.tokens[group], outcome.rows[group] = tokens[place][:count], first_rows[place]
        elif most is None or most[place]:
            outcome.failed[group] = errors.get(place, BAD_LOGITS)
    return Verdict(counts, committed, last)


def _accept(
    choices: Choices, logits: Tensor, rows: VerifyRows, mask: MaskWords | None
) -> tuple[Accepted, dict[int, str]]:
    """All groups at once; where that raises, one by one, so that only the groups at fault fail.

    raises  what it raised at once where no group is at fault: logits may be half edited by then
    """
    try:
        return choices.accept(logits, rows, mask), {}
    except Exception:
        n, width = len(rows.slots), rows.draft_ids.shape[1] + 1
        tokens = torch.zeros(n, width, dtype=torch.int64, device=logits.device)
        counts = torch.zeros(n, dtype=torch.int64, device=logits.device)
        valid = torch.zeros(n, dtype=torch.bool, device=logits.device)
        errors: dict[int, str] = {}
        stops = np.cumsum(rows.verify_lens)
        for place, (first, stop) in enumerate(zip(stops - rows.verify_lens, stops, strict=True)):
            try:
                own = None if mask is None else mask.part(int(first), int(stop))
                one = choices.accept(logits[first:stop], rows.only(place), own)
                tokens[place], counts[place], valid[place] = one.tokens[0], one.counts[0], one.valid[0]
            except Exception as error:
                errors[place] = f"sampling failed: {error}"
        if not errors:
            raise
        return Accepted(tokens, counts, valid), errors
