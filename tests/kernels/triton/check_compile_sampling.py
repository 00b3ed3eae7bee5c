"""Sampling kernels compile for compute capability 9.0, in no need of a device."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kernels.triton import (
    accept,
    accept_residual,
    accept_rows,
    draws,
    logits,
    logits_best,
    markov,
    masks,
)
from tests.kernels.triton.check_compile import compiled

POINTERS = {
    "slots": "*i64", "floats": "*fp32", "ints": "*i64", "positions": "*i64", "tops": "*fp32", "args": "*i32",
    "sums": "*fp64", "listed": "*i32", "tokens": "*i64", "valid": "*i8", "bests": "*fp32", "totals": "*fp64",
    "floors": "*i32", "lasts": "*i32", "lens": "*i64", "draft_logits": "*fp32", "ids": "*i64",
    "repeats": "*u8", "choices": "*i64", "draft_tops": "*fp32", "draft_sums": "*fp64", "counts": "*i64",
    "rows": "*i32", "drafted": "*i32", "q_best": "*fp32", "q_total": "*fp64", "more_sums": "*fp64",
    "p_sums": "*fp64", "row_slots": "*i64", "row_positions": "*i64", "row_groups": "*i64",
    "row_ahead": "*i64", "drafts": "*i64", "seen": "*i32", "bias_ids": "*i32", "bias_values": "*fp32",
    "bias_counts": "*i32", "stop_ids": "*i32", "stop_counts": "*i32", "stop_from": "*i64", "masks": "*i32",
    "mask_rows": "*i64", "previous": "*i64", "chosen": "*i64", "logprobs": "*fp32", "values": "*fp32",
    "w1": "*bf16", "w2": "*bf16",
}  # fmt: skip
STATS = ("tops", "args", "sums")
OTHER: dict[str, dict[str, str]] = {
    **{name: {"ids": "*i32"} for name in ("draw", "draw of few", "search")},
    **{name: {"rows": "i32"} for name in ("spread", "spread of one", "bias", "bias of a given e")},
}
"""Where a name means another type."""
ROW: dict[str, Any] = {"PLACES": 1024, "SIZE": 128}
NARROW: dict[str, Any] = {"PLACES": 1, "SIZE": 128, "groups": 1}
"""A row of one group: Triton makes constants of ones."""
JUDGE: dict[str, Any] = {"GROUPS": 128, "LANES": 8}
EDIT: dict[str, Any] = {"GROUPS": 16, "SIZE": 128}
PIECES: dict[str, Any] = {"across": 1}
"""Drafts as a block leaves them, position by position."""
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "group_stats": (logits._group_stats, {"GROUPS": 32, "SIZE": 128, "TEMPERED": True}),
    "group_stats of any": (
        logits._group_stats,
        {"GROUPS": 8, "SIZE": 128, "TEMPERED": False, "slots": None, "floats": None, "width": 1, "fields": 0},
    ),
    "draw": (draws._draw, ROW | {"MOST": 512, "LONG": 8192, "DRAFTS": False, "repeats": None, "step": 0}),
    "draw of few": (draws._draw, NARROW | {"MOST": 512, "LONG": 8192, "DRAFTS": True, "step": 1}),
    "search": (draws._search, ROW | {"MOST": 8192}),
    "bias": (markov._bias, {"ROWS": 16, "SIZE": 128, "STEP": 64, "LOOKED_UP": True}),
    "bias of a given e": (
        markov._bias,
        {"ROWS": 16, "SIZE": 128, "STEP": 64, "LOOKED_UP": False, "previous": None},
    ),
    "choose": (markov._choose, ROW),
    "choose of few": (markov._choose, NARROW | {"step": 1}),
    "edit": (masks._edit, EDIT | {"DRAFTED": True, "MASKED": True, "STATS": False} | dict.fromkeys(STATS)),
    "edit with statistics": (masks._edit, EDIT | {"DRAFTED": True, "MASKED": True, "STATS": True}),
    "edit without masks": (
        masks._edit,
        EDIT | {"DRAFTED": False, "MASKED": False, "STATS": True, "masks": None, "mask_rows": None},
    ),
    "edit of drafts without masks": (
        masks._edit,
        EDIT | {"DRAFTED": True, "MASKED": False, "STATS": True, "masks": None, "mask_rows": None} | PIECES,
    ),
    "count": (masks._count, {"LANES": 8}),
    "count of one": (masks._count, {"LANES": 1, "width": 1}),
    "best": (logits_best._best, ROW),
    "spread": (accept_rows._spread, {"GROUPS": 128, "LANES": 8}),
    "spread of one": (accept_rows._spread, {"GROUPS": 1, "LANES": 1, "groups": 1, "rows": 1}),
    "judge": (accept._judge, JUDGE | {"PLACES": 1024, "DENSE": True, "id_along": 1, "along": 1}),
    "judge of pieces": (accept._judge, JUDGE | {"PLACES": 1024, "DENSE": True, "id_across": 1, "across": 1}),
    "judge of one": (
        accept._judge,
        JUDGE
        | {"GROUPS": 1, "PLACES": 1024, "DENSE": True, "groups": 1}
        | {"across": 1, "along": 1, "id_across": 1, "id_along": 1},
    ),
    "judge one-hot": (
        accept._judge,
        JUDGE
        | {"PLACES": 1, "DENSE": False, "draft_logits": None, "draft_tops": None, "draft_sums": None}
        | {"places": 1, "gamma": 1, "across": 1},
    ),
    "sums": (accept_residual._sums, {"GROUPS": 16, "SIZE": 128, "DENSE": True, "across": 1}),
    "replace": (accept_residual._replace, ROW | {"DENSE": True, "across": 1}),
    "replace one-hot": (accept_residual._replace, NARROW | {"DENSE": False, "along": 1, "places": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    kernel, constants = CASES[name]
    known = {key: value for key, value in constants.items() if key in kernel.arg_names}
    compiled(kernel, POINTERS | OTHER.get(name, {}), known)
