"""Sampling kernels compile for compute capability 9.0, in no need of a device."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kernels.triton import draws, logits
from tests.kernels.triton.check_compile import compiled

POINTERS = {
    "slots": "*i64", "floats": "*fp32", "ints": "*i64", "positions": "*i64", "tops": "*fp32", "args": "*i32",
    "sums": "*fp64", "listed": "*i32", "tokens": "*i64", "valid": "*i8", "bests": "*fp32", "totals": "*fp64",
    "floors": "*i32", "lasts": "*i32",
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "group_stats": (logits._group_stats, {"GROUPS": 32, "SIZE": 128, "TEMPERED": True}),
    "draw": (draws._draw, {"PLACES": 1024, "SIZE": 128, "MOST": 512}),
    "search": (draws._search, {"WIDE": 1024}),
}


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    kernel, constants = CASES[name]
    compiled(kernel, POINTERS, constants)
