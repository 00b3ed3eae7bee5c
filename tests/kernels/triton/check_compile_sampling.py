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
OTHER: dict[str, dict[str, str]] = {"draw": {"ids": "*i32"}, "spread": {"rows": "i32"}}
OTHER |= {name: {"rows": "i32"} for name in ("bias", "bias of many rows")}
"""Where a name means another type."""
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "group_stats": (logits._group_stats, {"GROUPS": 32, "SIZE": 128, "TEMPERED": True}),
    "draw": (draws._draw, {"PLACES": 1024, "SIZE": 128, "MOST": 512, "DRAFTS": True}),
    "search": (draws._search, {"WIDE": 1024}),
    "bias": (markov._bias, {"ROWS": 16, "SIZE": 128, "STEP": 64, "LOOKED_UP": True}),
    "bias of many rows": (markov._bias, {"ROWS": 64, "SIZE": 128, "STEP": 64, "LOOKED_UP": True}),
    "choose": (markov._choose, {"PLACES": 1024, "SIZE": 128}),
    "edit": (masks._edit, {"LINES": 64, "WORD": 32, "DRAFTED": True, "MASKED": True}),
    "count": (masks._count, {"LANES": 8}),
    "best": (logits_best._best, {"PLACES": 1024, "SIZE": 128}),
    "spread": (accept_rows._spread, {"GROUPS": 128, "LANES": 8}),
    "judge": (accept._judge, {"GROUPS": 128, "LANES": 8, "PLACES": 1024, "DENSE": True}),
    "judge one-hot": (accept._judge, {"GROUPS": 128, "LANES": 8, "PLACES": 1, "DENSE": False}),
    "sums": (accept_residual._sums, {"GROUPS": 16, "SIZE": 128, "DENSE": True}),
    "sums one-hot": (accept_residual._sums, {"GROUPS": 16, "SIZE": 128, "DENSE": False}),
    "replace": (accept_residual._replace, {"PLACES": 1024, "SIZE": 128, "DENSE": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    kernel, constants = CASES[name]
    compiled(kernel, POINTERS | OTHER.get(name, {}), constants)
