"""Changes to logits before a temperature, in one pass and in place: bias, penalties, minimum length, grammar.

Source: engine/runner/edits.py and penalties.py, whose order of operations this is; bit order as xgrammar's.
A row that asks for nothing is not read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.accept_rows import VerifiedRows

TILE = 2048
IN_PROMPT = 1 << 30
"""Set in `EditTables.seen` where the prompt holds the token."""
_IN_PROMPT = tl.constexpr(IN_PROMPT)
WORD = 32


@dataclass(frozen=True)
class EditTables:
    """What the requests of S slots ask for, on the device.

    floats       float32 [S, 6], of SlotParameters
    seen         int32 [S, V], of penalised slots: occurrences in the output, plus IN_PROMPT
    bias_ids     int32 [S, N] and bias_values float32 [S, N], of which bias_counts int32 [S] count, in order
    stop_ids     int32 [S, N'], of which stop_counts int32 [S] count: forbidden before ...
    stop_from    int64 [S], ... this position
    """

    floats: Tensor
    seen: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bias_counts: Tensor
    stop_ids: Tensor
    stop_counts: Tensor
    stop_from: Tensor


def seen_row(tokens: bytes, prompt_tokens: int, vocab_size: int) -> Tensor:
    """A row of `EditTables.seen`, int32 [V] on the host, of a request that begins.

    tokens  int32[n] inside the vocabulary; those behind the prompt were generated before a retraction
    """
    ids = np.frombuffer(tokens, np.int32)
    row = np.bincount(ids[prompt_tokens:], minlength=vocab_size).astype(np.int32)
    row[ids[:prompt_tokens]] |= IN_PROMPT
    return torch.from_numpy(row)


@triton.jit
def _penalised(value, occurrences, factors, drafts, along, ahead, token):
    """Repetition, then frequency and presence, of a row that has also seen its first `ahead` drafts."""
    repetition, frequency, presence = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    for i in range(ahead):
        occurrences += (token == tl.load(drafts + i * along)).to(tl.int32)
    repetition += tl.zeros_like(value)
    repeated = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    count = occurrences & (_IN_PROMPT - 1)
    # On a device each product is rounded together with its difference, where torch rounds both.
    after = repeated - frequency * count.to(tl.float32) - presence * (count > 0).to(tl.float32)
    return tl.where(occurrences > 0, after, value)


@triton.jit
def _edit(
    logits, slots, positions, row_groups, row_ahead, drafts, floats, seen, bias_ids, bias_values, bias_counts,
    stop_ids, stop_counts, stop_from, masks, mask_rows, stride, across, along, columns, words, fields, biases,
    stops,
    LINES: tl.constexpr, WORD: tl.constexpr, DRAFTED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    mask_row = tl.full((), -1, tl.int64)
    if MASKED:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
    if slot >= 0:
        factors = floats + slot * fields + 3
        plain = (tl.load(factors) == 1.0) & (tl.load(factors + 1) == 0.0) & (tl.load(factors + 2) == 0.0)
        biased = tl.load(bias_counts + slot)
        early = tl.where(tl.load(positions + row) < tl.load(stop_from + slot), tl.load(stop_counts + slot), 0)
        if (plain == 0) | (biased > 0) | (early > 0) | (mask_row >= 0):
            line = tl.program_id(1) * LINES + tl.arange(0, LINES)
            token = line[:, None] * WORD + tl.arange(0, WORD)[None, :]
            held = token < columns
            at = logits + row * stride + token
            value = tl.load(at, mask=held, other=0.0)
            for i in range(biased):
                more = tl.load(bias_values + slot * biases + i)
                value = tl.where(token == tl.load(bias_ids + slot * biases + i), value + more, value)
            if plain == 0:
                occurrences = tl.load(seen + slot * columns + token, mask=held, other=0)
                ahead = tl.zeros((), tl.int64)
                if DRAFTED:
                    ahead = tl.load(row_ahead + row)
                    drafts += tl.load(row_groups + row) * across
                value = _penalised(value, occurrences, factors, drafts, along, ahead, token)
            for i in range(early):
                value = tl.where(token == tl.load(stop_ids + slot * stops + i), float("-inf"), value)
            if mask_row >= 0:
                word = tl.load(masks + mask_row * words + line, mask=line < words, other=0)
                allowed = (word[:, None] >> tl.arange(0, WORD)[None, :]) & 1
                value = tl.where(allowed > 0, value, float("-inf"))
            tl.store(at, value, mask=held)


@triton.jit
def _count(seen, slots, floats, tokens, counts, columns, width, fields, LANES: tl.constexpr):
    group = tl.program_id(0)
    slot = tl.load(slots + group).to(tl.int64)
    if slot >= 0:
        factors = floats + slot * fields + 3
        plain = (tl.load(factors) == 1.0) & (tl.load(factors + 1) == 0.0) & (tl.load(factors + 2) == 0.0)
        if plain == 0:
            lane = tl.arange(0, LANES)
            held = lane < tl.load(counts + group)
            token = tl.load(tokens + group * width + lane, mask=held, other=0)
            tl.atomic_add(seen + slot * columns + token, tl.full((LANES,), 1, tl.int32), mask=held)


def edit(
    logits: Tensor,
    rows: VerifiedRows,
    tables: EditTables,
    draft_ids: Tensor | None = None,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> None:
    """Edits rows in place.

    logits     float32 [R, V]
    rows       of each; those with a negative slot are left as they are
    draft_ids  int64 [groups, gamma]: row i of a group has seen the first i; None: every row stands alone
    masks      int32 [n, ceil(V / 32)], bit t % 32 of word t // 32 is 1 where token t is allowed
    mask_rows  int64 [R], the row of `masks` of each, -1 for none; with `masks` only
    raises     ShapeMismatch
    """
    count, columns = logits.shape
    words = triton.cdiv(columns, WORD)
    if rows.slots.shape != (count,) or tables.seen.shape[1] != columns:
        raise ShapeMismatch(f"logits are {tuple(logits.shape)}, {rows.slots.shape[0]} rows are described")
    if (masks is None) != (mask_rows is None) or (masks is not None and masks.shape[1] != words):
        raise ShapeMismatch(f"a vocabulary of {columns} has masks of {words} words, and one of a row")
    if count:
        across, along = (0, 0) if draft_ids is None else draft_ids.stride()
        _edit[(count, triton.cdiv(columns, TILE))](
            logits, rows.slots, rows.positions, rows.groups, rows.ahead,
            rows.ahead if draft_ids is None else draft_ids, tables.floats, tables.seen, tables.bias_ids,
            tables.bias_values, tables.bias_counts, tables.stop_ids, tables.stop_counts, tables.stop_from,
            masks, mask_rows, logits.stride(0), across, along, columns, words, tables.floats.stride(0),
            tables.bias_ids.shape[1], tables.stop_ids.shape[1], TILE // WORD, WORD, draft_ids is not None,
            masks is not None,
        )  # fmt: skip


def count_tokens(tables: EditTables, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
    """Counts what B groups emit, where their slots are penalised.

    slots   int64 [B], negative for padding;  tokens int64 [B, W], of which counts int64 [B] are emitted
    raises  ShapeMismatch
    """
    groups, width = tokens.shape
    if slots.shape != (groups,) or counts.shape != (groups,):
        raise ShapeMismatch(f"{groups} groups of tokens, {tuple(slots.shape)} slots")
    if groups:
        _count[(groups,)](
            tables.seen, slots, tables.floats, tokens, counts, tables.seen.shape[1], width,
            tables.floats.stride(0), triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
