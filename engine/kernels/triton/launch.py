"""Kernels that follow each other closely: the next one's programs are placed while the last ones of this run.

A kernel that is launched with AHEAD calls `await_previous` before it reads what another kernel wrote, or
writes at all; of weights, which no such kernel writes, it may load or prefetch some before.
Source: NVIDIA's programmatic dependent launch (PTX `griddepcontrol`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton.formats import INTERPRETED

AHEAD: dict[str, bool] = {} if INTERPRETED.value else {"launch_pdl": True}
"""Options of a launch."""
FEW_ROWS = 4
"""Programs that are placed early lie where room is: many of them crowd on few multiprocessors."""
LINE = 128
"""Bytes that one prefetch brings."""


def ahead(rows: int) -> dict[str, bool]:
    """AHEAD for kernels whose programs are as many as rows: where they are few."""
    return AHEAD if rows <= FEW_ROWS else {}


@triton.jit
def await_previous():
    """Lets the next kernel's programs be placed, and waits for all that kernels before this one write."""
    if not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(at):
    """Brings the lines at addresses `at` to the second-level cache."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )
