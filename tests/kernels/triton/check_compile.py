"""Kernels compile for compute capability 9.0, in no need of a device: what interpreting doesn't see."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton import (
    combine,
    experts,
    head,
    library,
    linear,
    mhc,
    mhc_enter,
    mhc_mix,
    near,
    norm,
    one_row,
    pack,
    project,
    quantise,
    routing,
)

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "x": "*bf16", "y": "*bf16", "act": "*bf16", "parts": "*bf16", "extra": "*bf16", "codes": "*fp8e4nv",
    "scales": "*u8", "x_scales": "*fp32", "w_scales": "*u8", "out": "*bf16", "weight": "*fp32", "ids": "*i32",
    "weights": "*fp32", "slots": "*i32", "owners": "*i32", "counts": "*i32", "tokens": "*i64",
    "table": "*i64", "logits": "*fp32", "bias": "*fp32", "fn": "*fp32", "mixed": "*fp32", "squares": "*fp32",
    "scale": "*fp32", "base": "*fp32", "pre": "*fp32", "post": "*fp32", "comb": "*fp32", "norm": "*fp32",
}  # fmt: skip
EXPERTS = {
    "x": "*fp8e4nv", "act": "*fp8e4nv", "act_scales": "*fp32", "w": "*u8", "words": "*i32",
}  # fmt: skip
FLOATS = {"eps", "hc_eps", "limit", "scaling"}
ENTERED = {"ITERATIONS": 20, "WIDE": 4096, "CODED": True, "SIZE": 128, "FLOOR": 1e-4}
WAITING = {"flags": "*i64", "turns": "*i64", "faults": "*i32", "patience_ns": "i64"}
ROUTED = {"COUNT": 6, "PADDED": 8, "WIDE": 256}
CASES: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "quantise": (quantise._quantise, {"scales": "*fp32"}, {"FLOOR": 1e-4, "GROUPS": 8, "SIZE": 128}),
    "swiglu": (quantise._swiglu, {"scales": "*fp32"}, {"FLOOR": 1e-4, "GROUPS": 8, "SIZE": 128}),
    "quantise_words": (
        quantise._quantise_words, {"codes": "*u8", "scales": "*fp32"}, {"FLOOR": 1e-4, "GROUPS": 8},
    ),
    "linear few": (
        linear._linear, {"x": "*fp8e4nv", "w": "*fp8e4nv", "out": "*fp32"},
        {"ROWS": 16, "OUTPUTS": 64, "SPLIT": 4, "SWAP": True, "CODED": True, "SIZE": 128, "LINES": 8},
    ),
    "linear many": (
        linear._linear, {"x": "*fp8e4nv", "w": "*fp8e4nv"},
        {"ROWS": 64, "OUTPUTS": 128, "SPLIT": 1, "SWAP": False, "CODED": True, "SIZE": 128, "LINES": 0},
    ),
    "linear bf16": (
        linear._linear, {"x_scales": "*bf16", "w": "*fp8e4nv"},
        {"ROWS": 16, "OUTPUTS": 64, "SPLIT": 1, "SWAP": True, "CODED": False, "SIZE": 128, "LINES": 8},
    ),
    "one row": (
        one_row._linear_row, {"w": "*fp8e4nv"},
        {"OUTPUTS": 8, "WIDE": 4096, "CODED": False, "SIZE": 128, "WHOLE": True},
    ),
    "one row of codes": (
        one_row._linear_row, {"x": "*fp8e4nv", "w": "*fp8e4nv"},
        {"OUTPUTS": 2, "WIDE": 8192, "CODED": True, "SIZE": 128, "WHOLE": False},
    ),
    "one row of bf16": (
        one_row._project_row, {"w": "*bf16", "biases": "*fp32", "at": "*i64", "out": "*fp32"},
        {"OUTPUTS": 4, "WIDE": 4096, "BIASED": True, "WHOLE": True},
    ),
    "library scales": (
        library._library_scales, {"turned": "*fp32", "wide": "*fp32"},
        {"ROWS": 64, "GROUPS": 64, "COUNT": 2048},
    ),
    "decode": (library._decode_weight, {"w": "*fp8e4nv"}, {"ROWS": 64, "SIZE": 128}),
    "norm_rows": (
        norm._rms_norm, {"codes": "*fp8e4nv", "scales": "*fp32"},
        {"ROWS": 4, "WIDE": 1024, "WEIGHTED": True, "CODED": True, "SIZE": 128, "FLOOR": 1e-4},
    ),
    "mix": (mhc_mix._mix, {}, {"SPLIT": 16, "ROWS": 16, "WIDE": 64, "OUTPUTS": 24}),
    "mix fp32": (mhc_mix._mix, {"x": "*fp32"}, {"SPLIT": 16, "ROWS": 16, "WIDE": 64, "OUTPUTS": 24}),
    "mix row": (mhc_mix._mix_row, {}, {"WIDE": 64, "OUTPUTS": 24, "LEFT": True}),
    "enter": (
        mhc_enter._enter, {"codes": "*fp8e4nv", "scales": "*fp32"},
        {**ENTERED, "SPLIT": 64, "ROWS": 2, "KIND": 0},
    ),
    "gates": (
        mhc_enter._enter, {"codes": "*fp8e4nv", "scales": "*fp32"},
        {**ENTERED, "SPLIT": 4, "ROWS": 1, "KIND": 1},
    ),
    "collapse and code": (
        mhc_enter._enter, {"codes": "*fp8e4nv", "scales": "*fp32"},
        {**ENTERED, "SPLIT": 4, "ROWS": 1, "KIND": 2},
    ),
    "collapse": (head._collapse, {}, {"SPLIT": 64, "WIDE": 4096, "NORMED": True}),
    "post": (mhc._post, {}, {"WIDE": 1024}),
    "route": (routing._route, {}, {**ROUTED, "HASHED": False, "PARTS": 16, "MARKED": False}),
    "route by token": (
        routing._route, {"padding": "*u8"}, {**ROUTED, "HASHED": True, "PARTS": 1, "MARKED": True}
    ),
    "project": (
        project._project, {"w": "*bf16", "parts": "*fp32"},
        {"SPLIT": 8, "ROWS": 16, "OUTPUTS": 64, "WIDE": 128, "LINES": 8},
    ),
    "add parts": (
        project._add, {"parts": "*fp32", "biases": "*fp32", "at": "*i64", "out": "*fp32"},
        {"PARTS": 8, "WIDE": 1024},
    ),
    "count": (routing._count, {}, {"CHUNK": 512, "FLAGS": 0}),
    "count what arrives": (routing._count, WAITING, {"CHUNK": 512, "FLAGS": 1024}),
    "sort": (routing._sort, {}, {"ROWS": 16, "WIDE": 256, "CHUNK": 2048, "COUNTED": True, "FLAGS": 0}),
    "count and sort": (
        routing._sort, WAITING, {"ROWS": 16, "WIDE": 256, "CHUNK": 512, "COUNTED": False, "FLAGS": 128},
    ),
    "gate_up": (
        experts._gate_up, EXPERTS | {"act": "*u8"},
        {
            "CHOICES": 6, "ROWS": 16, "OUTPUTS": 128, "STAGES": 4, "EVEN": False, "SORTED": False,
            "FLOOR": 1e-4,
        },
    ),
    "gate_up many": (
        experts._gate_up, EXPERTS | {"act": "*bf16"},
        {"CHOICES": 6, "ROWS": 64, "OUTPUTS": 64, "STAGES": 4, "EVEN": True, "SORTED": True, "FLOOR": 1e-4},
    ),
    "sort_scales": (
        experts._sort_scales, {"scales": "*fp32", "out": "*fp32"}, {"CHOICES": 6, "ROWS": 64, "WIDE": 32},
    ),
    "code": (
        experts._code, {"codes": "*u8", "scales": "*fp32"}, {"ROWS": 64, "GROUP": 128, "FLOOR": 1e-4},
    ),
    "down": (experts._down, EXPERTS, {"ROWS": 16, "OUTPUTS": 128, "STAGES": 4, "EVEN": True, "HOME": False}),
    "down home": (
        experts._down, {**EXPERTS, "out": "*i64"},
        {"ROWS": 16, "OUTPUTS": 128, "STAGES": 4, "EVEN": True, "HOME": True},
    ),
    "combine": (combine._combine, {}, {"CHOICES": 6, "WIDE": 1024, "EXTRA": True}),
    "clear": (combine._clear, {}, {"CHOICES": 6, "PADDED": 8, "WIDE": 1024}),
    "join": (combine._join, {}, {"PARTS": 2, "CHOICES": 6, "WIDE": 1024}),
    "pack": (pack._pack, {"out": "*u8"}, {"CHOICES": 6, "PADDED": 8, "WIDE": 4096}),
    "push": (
        near._push, {**WAITING, "bases": "*i64"},
        {"RANKS": 2, "CHOICES": 6, "PADDED": 8, "GROUPS": 32, "FLOOR": 1e-4},
    ),
    "join home": (
        near._join_home, {**WAITING, "back": "*bf16", "through": "*i64", "bases": "*i64"},
        {"RANKS": 2, "CHOICES": 6, "WIDE": 1024, "APART": 16, "THREADS": 128},
    ),
    "unpack": (pack._unpack, {"packed": "*u8"}, {"CHOICES": 6, "PADDED": 8, "WIDE": 4096}),
}  # fmt: skip


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """PTX of a kernel, `types` of its arguments beside POINTERS and FLOATS; every other one is int32."""
    signature: dict[str, str] = {}
    for argument in kernel.arg_names:
        known = {**POINTERS, **types}
        plain = "fp32" if argument in FLOATS else "i32"
        signature[argument] = "constexpr" if argument in constants else known.get(argument, plain)
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    # Sizes and addresses are multiples of 16, as on the device.
    hints = {
        (i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if signature[a] != "fp32"
    }
    hints = {at: hint for at, hint in hints.items() if at not in values}
    source = ASTSource(kernel, signature, values, hints)
    made = triton.compile(source, target=HOPPER, options={"enable_fp_fusion": True})
    text: str = made.asm["ptx"]
    assert ".target sm_90" in text
    return text


@pytest.mark.parametrize("name", CASES)
def test_compiles(name: str) -> None:
    text = compiled(*CASES[name])
    if name.startswith(("linear", "gate_up", "down")):
        assert "wgmma.mma_async" in text
    if name in ("push", "down home"):
        assert "st.global.v4.b32" in text, "rows for another device go in wide words"
