"""Attention, rotation and storing compile for compute capability 9.0, in no need of a device."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from engine.kernels.triton import attend, attend_coded, attend_kernels, rope, store, turns
from engine.kernels.triton.attend import AttendShape
from tests.kernels.triton.check_compile import HOPPER

TYPES = {
    "w_rows": "*i64", "c_rows": "*i32", "w_bias": "*fp32", "c_bias": "*fp32", "w_seen": "*i32",
    "c_seen": "*i32", "q": "*bf16", "sink": "*fp32", "before": "*fp32", "turns": "*fp32", "totals": "*fp32",
    "faults": "*i32", "x": "*bf16", "weight": "*fp32", "places": "*i64", "parts": "*fp32", "out": "*bf16",
    "eps": "fp32", "scale": "fp32",
}  # fmt: skip


def attended(
    cut: AttendShape, kept: str, biased: bool, normed: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """Attention over pools of pointer type `kept`, keys by bias or by ranges; normed: of raw heads."""
    rows = "*i64" if biased else "*i32"
    types = {"w_pool": kept, "c_pool": kept, "out": "*fp32" if cut.tiles else "*bf16"}
    types |= {"w_rows": rows, "c_rows": rows}
    constants = {
        "HEADS": cut.heads, "KEYS": cut.keys, "CODED": kept == "*u8", "W_BIASED": biased,
        "C_BIASED": biased, "W_RANGED": not biased, "C_RANGED": not biased, "NORMED": normed,
        "TURNED": True, "SPLIT": cut.tiles > 0, "APART": cut.heads == 64,
    }  # fmt: skip
    return attend_kernels._attend, types, constants


def stored(kept: str, form: int) -> tuple[Any, dict[str, str], dict[str, Any]]:
    sizes = {"ROWS": 4, "WIDE": 512, "FORMAT": form, "SIZE": 64, "FLOOR": 1e-4, "TOP": 7}
    return store._store, {"pool": kept}, sizes


BOTH = {"q_weight": "*fp32", "codes": "*fp8e4nv", "scales": "*fp32"}
BF16, FP8 = torch.bfloat16, torch.uint8
ATTENDED = {
    "many": (attend.MANY[BF16], "*bf16", False),
    "many coded": (attend.MANY[FP8], "*u8", False),
    "few": (replace(attend.FEW[BF16], tiles=1), "*bf16", True),
    "few coded": (replace(attend.FEW[FP8], tiles=2), "*u8", False),
}
CODED = {"W_RANGED": True, "C_RANGED": True, "TURNED": True}
OTHERS: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {
    "q_norm_rope": (rope._rotate, {"taken": "*i64"}, {"ROWS": 8, "WIDE": 512, "NORMED": True, "TAKEN": True}),
    "turns": (
        turns._turns,
        {"positions": "*i64", "table": "*fp32", "out": "*fp32", "back": "*fp32"},
        {"ROWS": 32, "WIDE": 32, "BACK": True},
    ),
    "store": stored("*bf16", 1),
    "store coded": stored("*u8", 2),
    "store and norm": (
        store._store_and_norm,
        {**BOTH, "pool": "*u8"},
        {**stored("*u8", 2)[2], "Q_ROWS": 4, "Q_WIDE": 1024, "Q_SIZE": 128},
    ),
    "combine": (attend_kernels._combine_parts, {}, {"PARTS": 8, "TURNED": True}),
}


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 3
) -> Any:
    """Addresses and sizes are multiples of 16, but for those for which the kernel isn't specialised."""
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    signature, hints = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        kind = "constexpr" if name in constants else (TYPES | types).get(name, "i32")
        signature[name] = kind
        loose = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if kind not in ("constexpr", "fp32") and not loose:
            hints[(parameter.num,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = language(kernel, signature, values, hints)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})


def stack_bytes(cubin: bytes) -> int:
    """Local memory of a thread, which is what spilled registers take."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(told.split("STACK:")[1].split()[0])


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_compiles_to_what_the_device_has(name: str) -> None:
    """Shared memory holds, registers do (but for a few that are spilled), keys are copied while products run,
    and many heads use the wide matrix unit."""
    cut, kept, biased = ATTENDED[name]
    made = compiled(*attended(cut, kept, biased, cut.heads == 16), cut.warps, cut.stages)
    assert made.metadata.shared <= 227 << 10
    assert "cp.async" in made.asm["ptx"]
    assert ("wgmma.mma_async" in made.asm["ptx"]) == (cut.heads == 64)
    assert stack_bytes(made.asm["cubin"]) <= 256


@pytest.mark.parametrize("split", [False, True])
def test_attention_by_warps_of_their_own_compiles_to_what_the_device_has(split: bool) -> None:
    types = {"w_pool": "*u8", "c_pool": "*u8", "out": "*fp32" if split else "*bf16"}
    made = compiled(attend_coded._attend_coded, types, CODED | {"SPLIT": split}, 8)
    assert made.metadata.shared <= 227 << 10
    for instruction in ("cp.async", "wgmma.mma_async", "mbarrier.try_wait", "setmaxnreg"):
        assert instruction in made.asm["ptx"]
    assert stack_bytes(made.asm["cubin"]) <= 256


@pytest.mark.parametrize("name", OTHERS)
def test_compiles(name: str) -> None:
    assert ".target sm_90" in compiled(*OTHERS[name]).asm["ptx"]
