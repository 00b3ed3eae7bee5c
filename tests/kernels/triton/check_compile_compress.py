"""Compression, scoring and selection compile for compute capability 9.0, in no need of a device."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kernels.triton import (
    compress_c4,
    compress_c128,
    compress_commit,
    entry_rows,
    index_queries,
    index_scores,
    select_entries,
)
from tests.kernels.triton.check_compile_attention import compiled, stack_bytes

POINTERS = {
    "ring": "*fp32", "ring_rows": "*i64", "pending": "*fp32", "halves": "*i64", "turns": "*fp32",
    "out_rows": "*i64", "index_norm": "*fp32", "faults": "*i32", "pool": "*bf16", "keys": "*bf16",
    "key_scales": "*fp32", "states": "*fp32", "slots": "*i64", "fresh": "*u8", "firsts": "*i64",
    "counts": "*i64", "starts": "*i64", "lens": "*i64", "q": "*bf16", "rows": "*i64", "visible": "*i64",
    "scores": "*fp32", "entries": "*i32", "chosen_scores": "*fp32", "factor": "fp32", "eps": "fp32",
    "norm": "*fp32", "weights": "*fp32", "bias": "*fp32",
}  # fmt: skip
LISTED = {"rows": "*i32", "visible": "*i32"}
"""As plans by ranges have them."""
CODED = {"pool": "*u8", "keys": "*fp8e4nv", "q": "*fp8e4nv"}
WINDOW = {"ROWS": 16, "WINDOW": 128, "EMPTY": -1e30, "WIDE": 512}
KEYS = {"HEADS": 64, "CHANNELS": 128, "TILE": 64}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "close c4": (
        compress_c4._close_c4, CODED,
        {"FORM": 2, "KEY_FORM": 2, "ITEMS": 8, "WIDE": 512, "KEY_WIDE": 128, "STAGES": 7, "KEY_GROUP": 32},
    ),
    "close c128": (compress_c128._close_c128, CODED, {"FORM": 2, **WINDOW}),
    "close c128 row by row": (compress_c128._close_c128, CODED, {"FORM": 2, **WINDOW, "ROWS": 1}),
    "commit c128": (compress_commit._commit_c128, {}, WINDOW),
    "commit c128 row by row": (compress_commit._commit_c128, {}, {**WINDOW, "ROWS": 1}),
    "commit c4": (compress_commit._commit_c4, {}, {"WIDE": 1024, "RING": 8}),
    "entry rows": (
        entry_rows._entry_rows, {"pages": "*i32", "entries": "i32", "out": "*i32"}, {"PAGE": 64, "WIDE": 1024}
    ),
    "code queries": (
        index_queries._round_queries,
        {"out": "*fp8e4nv", "scaled": "*fp32", "rows": "i32", "taken": "*i64"},
        {"ROWS": 64, "WIDE": 128, "GROUP": 32, "CODED": True, "TAKEN": True, "PARTS": 8},
    ),
    "score": (
        index_scores._index_scores, {**LISTED, "entries": "i32", "out": "*fp32"},
        {"QUERIES": 1, "COUNTED": True, "CODED": False, **KEYS},
    ),
    "score in FP8": (
        index_scores._index_scores, {**CODED, **LISTED, "entries": "i32", "out": "*fp32"},
        {"QUERIES": 2, "COUNTED": True, "CODED": True, **KEYS},
    ),
    "select of parts": (
        select_entries._select, {**LISTED, "out": "*i32"},
        {"WIDE": 4096, "WANTED": 512, "FROM": True, "ROWS": True, "SCORED": True},
    ),
}  # fmt: skip


WARPS = {"close c128": 8, "close c128 row by row": 8, "select of parts": 8}
"""Of a program; of the others 4."""


@pytest.mark.parametrize("name", CASES)
def test_compiles_and_spills_nothing(name: str) -> None:
    kernel, types, constants = CASES[name]
    made = compiled(
        kernel, POINTERS | types, constants, WARPS.get(name, 4), 5 if name.startswith("score") else 3
    )
    assert ("wgmma.mma_async" in made.asm["ptx"]) == name.startswith(("score", "code"))
    assert stack_bytes(made.asm["cubin"]) == 0
