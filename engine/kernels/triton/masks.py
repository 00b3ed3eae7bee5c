"""Changes to logits before a temperature, in one pass and in place: bias, penalties, minimum length, grammar.

Source: engine/runner/edits.py and penalties.py, whose order of operations this is; bit order as xgrammar's.
A row that asks for nothing is not read, but for statistics of the result, which may be had in the same pass.
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
from engine.kernels.triton.draws_numbers import GROUP
from engine.kernels.triton.logits import groups_of_a_program, store_stats
from engine.model.group_stats import GroupStats

IN_PROMPT = 1 << 30
"""Set in `EditTables.seen` where the prompt holds the token."""
_IN_PROMPT = tl.constexpr(IN_PROMPT)


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
def _biased(value, token, ids, values, count):
    """Adds the biases, one by one: a token may have several."""
    for i in range(count):
        value = tl.where(token == tl.load(ids + i), value + tl.load(values + i), value)
    return value


@triton.jit
def _forbidden(value, token, held, stops, early, masks, mask_row, words, MASKED: tl.constexpr):
    """Sets the first `early` stops, and what the row's mask forbids, to minus infinity."""
    for i in range(early):
        value = tl.where(token == tl.load(stops + i), float("-inf"), value)
    if MASKED:  # noqa: SIM102 (without masks there is nothing to compile)
        if mask_row >= 0:
            word = tl.load(masks + mask_row * words + token // 32, mask=held, other=0)
            value = tl.where(((word >> (token % 32)) & 1) > 0, value, float("-inf"))
    return value


@triton.jit
def _asked(slot, position, mask_row, floats, bias_counts, stop_counts, stop_from, fields):
    """(Whether penalised, how many biases, how many stops are too early, whether any edit is asked for)."""
    factors = floats + slot * fields + 3
    plain = (tl.load(factors) == 1.0) & (tl.load(factors + 1) == 0.0) & (tl.load(factors + 2) == 0.0)
    penalised = (plain == 0).to(tl.int32)
    biased = tl.load(bias_counts + slot)
    early = tl.where(position < tl.load(stop_from + slot), tl.load(stop_counts + slot), 0)
    return penalised, biased, early, (penalised > 0) | (biased > 0) | (early > 0) | (mask_row >= 0)


@triton.jit(do_not_specialize=["across", "along"])
def _edit(
    logits, slots, positions, row_groups, row_ahead, drafts, floats, seen, bias_ids, bias_values, bias_counts,
    stop_ids, stop_counts, stop_from, masks, mask_rows, tops, args, sums, stride, across, along, columns,
    words, groups, fields, biases, stops,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, DRAFTED: tl.constexpr, MASKED: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    mask_row = tl.full((), -1, tl.int64)
    if MASKED:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
    if slot >= 0:
        penalised, biased, early, asked = _asked(
            slot, tl.load(positions + row), mask_row, floats, bias_counts, stop_counts, stop_from, fields
        )
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        token = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        at, held = logits + row * stride + token, token < tl.where(STATS | asked, columns, 0)
        value = tl.load(at, mask=held, other=float("-inf"))
        if asked:
            value = _biased(value, token, bias_ids + slot * biases, bias_values + slot * biases, biased)
            if penalised > 0:
                occurrences = tl.load(seen + slot * columns + token, mask=held, other=0)
                ahead = tl.zeros((), tl.int64)
                if DRAFTED:
                    ahead = tl.load(row_ahead + row)
                    drafts += tl.load(row_groups + row) * across
                factors = floats + slot * fields + 3
                value = _penalised(value, occurrences, factors, drafts, along, ahead, token)
            value = _forbidden(
                value, token, held, stop_ids + slot * stops, early, masks, mask_row, words, MASKED
            )
            tl.store(at, value, mask=held)
        if STATS:
            temperature, into = tl.load(floats + slot * fields), row * groups + group
            store_stats(value, into, group < groups, group * SIZE, temperature, tops, args, sums)


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


@dataclass(frozen=True)
class RowMasks:
    """Grammar masks: words int32 [n, ceil(V / 32)], and rows int64 [R], which of them each row has; -1: none.

    Bit t % 32 of word t // 32 is 1 where token t is allowed.
    """

    words: Tensor
    rows: Tensor


def edit(
    logits: Tensor,
    rows: VerifiedRows,
    tables: EditTables,
    draft_ids: Tensor | None = None,
    masks: RowMasks | None = None,
    stats: GroupStats | None = None,
) -> None:
    """Edits rows in place.

    logits     float32 [R, V]
    rows       of each; those with a negative slot are left as they are
    draft_ids  int64 [groups, gamma]: row i of a group has seen the first i; None: every row stands alone
    stats      `logits.new_stats`: written at the slots' temperatures, of edited rows and of all others
    raises     ShapeMismatch
    """
    count, columns = logits.shape
    words, groups = triton.cdiv(columns, 32), triton.cdiv(columns, GROUP)
    if rows.slots.shape != (count,) or tables.seen.shape[1] != columns:
        raise ShapeMismatch(f"logits are {tuple(logits.shape)}, {rows.slots.shape[0]} rows are described")
    if masks is not None and (masks.words.shape[1] != words or masks.rows.shape != (count,)):
        raise ShapeMismatch(f"a vocabulary of {columns} has masks of {words} words, and one a row")
    if stats is not None and stats.tops.shape != (count, groups):
        raise ShapeMismatch(f"statistics are {tuple(stats.tops.shape)}, not {(count, groups)}")
    if count:
        # Edits take twice the registers of statistics alone.
        several = min(16, groups_of_a_program(count))
        _edit[(count, triton.cdiv(groups, several))](
            logits, rows.slots, rows.positions, rows.groups, rows.ahead,
            rows.ahead if draft_ids is None else draft_ids, tables.floats, tables.seen, tables.bias_ids,
            tables.bias_values, tables.bias_counts, tables.stop_ids, tables.stop_counts, tables.stop_from,
            *((None, None) if masks is None else (masks.words, masks.rows)),
            *((None, None, None) if stats is None else (stats.tops, stats.args, stats.sums)),
            logits.stride(0), *((0, 0) if draft_ids is None else draft_ids.stride()), columns, words, groups,
            tables.floats.stride(0), tables.bias_ids.shape[1], tables.stop_ids.shape[1], several, GROUP,
            draft_ids is not None, masks is not None, stats is not None,
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
