"""Experts in packed FP4: two grouped products over blocks of one expert's rows.

Weights are decoded to e4m3 in registers, exactly, and multiplied with activations in FP8; what 128 channels
give is summed in float32 with the scales of both. Weights fill the matrix unit's long side, rows its short
one. Source: DeepSeek-V4's experts (clamp before silu; the routing weight before the second product, whose
input is rounded after it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.combine import clear_outside, combine
from engine.kernels.triton.expert_kernels import _code, _down, _gate_up, _sort_scales
from engine.kernels.triton.formats import AMAX_FLOOR, GROUP
from engine.kernels.triton.launch import AHEAD
from engine.kernels.triton.quantise import quantise_words
from engine.kernels.triton.routing import Blocks, sort_choices
from engine.model.quantised import Fp4Experts

FEW_ROWS = 16
"""Blocks of so many rows have their scales read where they are."""
SCALES_WIDE = 32
EARLY_CHOICES = 48
Coded = tuple[Tensor, Tensor]
"""Rows [T, K] as e4m3 codes, and their scales float32 [T, K / 128] or, by blocks, [blocks, K / 128, rows]."""


@dataclass(frozen=True)
class Cut:
    """How one product is cut: outputs of a program, warps, stages of the pipeline."""

    outputs: int
    warps: int
    stages: int


@dataclass(frozen=True)
class ExpertShape:
    """Rows of a block, and both products. Where gate_up's outputs are fewer than 128, a whole group of down's
    input, another kernel rounds them."""

    rows: int
    gate_up: Cut
    down: Cut


def shape_for(choices: int, experts: int) -> ExpertShape:
    """A cut for so many choices of so many experts, on this rank or others.

    Measured on an H200 with 128 experts of 4096 x 2048 that have 3, 18, 36 and 380 rows each on average:
    blocks of 16 rows read 4.2 TB/s at 3 rows, and take a fourth longer than those of 32 at 18; those of 64,
    which leave more empty, do a tenth more where they are full.
    """
    rows = choices / experts
    if rows <= 12:
        return ExpertShape(16, Cut(128, 4, 5), Cut(128, 4, 4))
    if rows <= 144:
        return ExpertShape(32, Cut(128, 4, 4), Cut(128, 4, 4))
    return ExpertShape(64, Cut(64, 4, 4), Cut(128, 4, 4))


def _early(choices: int) -> dict[str, bool]:
    """As `ahead`, for so many choices: more programs would crowd where room is first."""
    return AHEAD if choices <= EARLY_CHOICES else {}


def gate_up(x: Coded, weights: Tensor, experts: Fp4Experts, blocks: Blocks, limit: float, cut: Cut) -> Coded:
    """Each choice's weighted activation in FP8, in the order of `quantise_words`; [T k, I], scales by blocks.

    x        [T, H], as `quantise_words` gives it
    weights  float32 [T, k]
    limit    gates are at most this, ups within it
    raises   ShapeMismatch. Rows of ids outside 0..E - 1 aren't written.
    """
    if cut.outputs > GROUP or experts.inner % cut.outputs:
        raise ShapeMismatch(f"{cut} for {experts.inner} outputs: rounding takes groups of {GROUP}")
    (codes, scales), choices, inner = x, weights.numel(), experts.inner
    act = torch.empty(choices, inner, dtype=torch.float8_e4m3fn, device=codes.device)
    count, whole = blocks.owners.shape[0], cut.outputs == GROUP
    act_scales = scales.new_empty(count, inner // GROUP, blocks.rows)
    if choices:
        many = blocks.rows > FEW_ROWS
        if many:
            scales = _sorted(scales, blocks, weights.shape[1])
        values = act.view(torch.uint8) if whole else act.new_empty(choices, inner, dtype=torch.bfloat16)
        _gate_up[(inner // cut.outputs, count)](
            codes, scales, experts.w13, experts.s13, experts.s13.view(torch.int32), weights, blocks.slots,
            blocks.owners, values, act_scales, experts.hidden // GROUP, inner, limit, weights.shape[1],
            blocks.rows, cut.outputs, cut.stages, experts.even, many, AMAX_FLOOR, num_warps=cut.warps,
            **_early(choices),
        )  # fmt: skip
        if not whole:
            _code[(inner // GROUP, count)](
                values, act.view(torch.uint8), act_scales, blocks.slots, blocks.owners, inner, blocks.rows,
                GROUP, AMAX_FLOOR, **_early(choices),
            )  # fmt: skip
    return act, act_scales


def _sorted(scales: Tensor, blocks: Blocks, choices: int) -> Tensor:
    """Scales of rows [T, K / 128] by blocks: programs with many rows then read them in wide words."""
    count, groups = blocks.owners.shape[0], scales.shape[1]
    out = scales.new_empty(count, groups, blocks.rows)
    grid = (count, -(-groups // SCALES_WIDE))
    _sort_scales[grid](scales, out, blocks.slots, blocks.owners, groups, choices, blocks.rows, SCALES_WIDE)
    return out


@dataclass(frozen=True)
class Home:
    """Memory of every rank, for the rows of its own choices.

    bases  int64 [P]: the ranks' addresses, multiples of 16
    at     the byte there that has the first choice; a multiple of 16
    share  choices of a rank: those of rank r begin at r times this
    """

    bases: Tensor
    at: int
    share: int


def down(
    act: Coded, experts: Fp4Experts, blocks: Blocks, cut: Cut, out: Tensor | Home | None = None
) -> Tensor:
    """What each choice's expert gives; bfloat16 [T k, H]. Rows of ids outside 0..E - 1 aren't written.

    out     where it goes; None: new memory, with anything in such rows; Home: there, the result is empty
    raises  ShapeMismatch
    """
    if experts.hidden % cut.outputs:
        raise ShapeMismatch(f"{cut} for {experts.hidden} outputs")
    codes, scales = act
    home = out if isinstance(out, Home) else None
    if not isinstance(out, Tensor):
        count = 0 if home else codes.shape[0]
        out = torch.empty(count, experts.hidden, dtype=torch.bfloat16, device=codes.device)
    if codes.shape[0]:
        _down[(experts.hidden // cut.outputs, blocks.owners.shape[0])](
            codes, scales, experts.w2, experts.s2, experts.s2.view(torch.int32), blocks.slots, blocks.owners,
            home.bases if home else out, experts.inner // GROUP, experts.hidden, home.at if home else 0,
            home.share if home else 1, blocks.rows, cut.outputs, cut.stages, experts.even, home is not None,
            num_warps=cut.warps, **_early(codes.shape[0]),
        )  # fmt: skip
    return out


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, extra: Tensor | None = None,
    shape: ExpertShape | None = None, dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    """Sum over each row's experts, plus `extra`; [T, H] of `dtype`. Sizes follow from shapes alone.

    x        [T, H] bfloat16 or float32; ids [T, k] int32 or int64, outside 0..E - 1: nothing is added
    weights  [T, k] float32
    raises   ShapeMismatch
    """
    shape = shape or shape_for(ids.numel(), experts.count)
    rows = _rows(x, ids, weights, experts, limit, shape, None)
    return combine(rows, ids.contiguous(), experts.count, extra, dtype)


def choice_rows(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, of: int | None = None,
    shape: ExpertShape | None = None,
) -> Tensor:  # fmt: skip
    """What each choice's expert gives, weighted; bfloat16 [T, k, H], zero for ids outside 0..E - 1.

    Other arguments and errors as of `run_experts`.
    of  how many experts there are on all ranks; None: those here
    """
    out = torch.empty(ids.numel(), experts.hidden, dtype=torch.bfloat16, device=x.device)
    clear_outside(out, ids.contiguous(), experts.count)
    shape = shape or shape_for(ids.numel(), of or experts.count)
    return _rows(x, ids, weights, experts, limit, shape, out).view(*ids.shape, experts.hidden)


def _rows(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Fp4Experts, limit: float, shape: ExpertShape,
    out: Tensor | None,
) -> Tensor:  # fmt: skip
    if x.shape[1] != experts.hidden or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ShapeMismatch(f"x {tuple(x.shape)}, ids {tuple(ids.shape)}, experts of {experts.hidden}")
    ids, weights = ids.contiguous(), weights.contiguous()
    blocks = sort_choices(ids, experts.count, shape.rows)
    return coded_rows(quantise_words(x), weights, experts, blocks, limit, shape, out)


def coded_rows(
    x: Coded, weights: Tensor, experts: Fp4Experts, blocks: Blocks, limit: float, shape: ExpertShape,
    out: Tensor | Home | None,
) -> Tensor:  # fmt: skip
    """What each choice's expert gives, weighted, as `down`, of rows as `quantise_words` gives them."""
    return down(gate_up(x, weights, experts, blocks, limit, shape.gate_up), experts, blocks, shape.down, out)
