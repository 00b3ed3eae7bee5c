"""Waiting for what another rank's device wrote into this one's memory, and telling that something is written.

A turn is a number that all ranks count alike. Who wrote stores it as a flag in the other one's memory, after
what it wrote; who reads waits until its flag has this turn. A flag is written once a turn, and for the next
turn not before this one was read: it is equal or not yet there. Turns are int64 and never come round.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from engine.kernels.triton.faults import PEER, report
from engine.kernels.triton.formats import INTERPRETED


def _of_first(instruction: str) -> tl.constexpr:
    """PTX of the first thread alone; behind a barrier, what the others wrote before comes first."""
    return tl.constexpr(f"""{{
.reg .pred one;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 one, thread, 0;
@one {instruction}
mov.u32 $0, 0;
}}""")


_FENCE = _of_first("fence.acq_rel.sys;")
_STORE = _of_first("st.relaxed.sys.global.b64 [$1], $2;")
SPIN_NS = tl.constexpr(1000)
"""What a look at the flags counts for where kernels are interpreted and have no clock."""
THREADS, MANY = 128, 1024
"""Of a program that waits, each with a flag of its own; and flags that it looks at at once in large steps."""


@dataclass(frozen=True)
class Arrival:
    """What a kernel waits for before it reads anything else.

    flags        int64, contiguous: each has the turn when its rank has written
    turns        int64 [2]: turns that were begun by a push, and by an arrival
    faults       int32 [1], see faults.py; PEER where a flag is missing after `patience_ns`
    """

    flags: Tensor
    turns: Tensor
    faults: Tensor
    patience_ns: int


@triton.jit
def await_flags(flags, count, turn, faults, patience_ns, WIDE: tl.constexpr, APART: tl.constexpr):
    """Until `count` flags that lie APART have this turn, or patience is over, here or in a wait before.

    WIDE  that are looked at at once, THREADS or more
    """
    begin, spent = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if not INTERPRETED:
        begin = globaltimer()
    for first in range(0, count, WIDE):
        lane = first + tl.arange(0, WIDE)
        behind = 1
        while behind == 1:
            seen = tl.load(flags + lane * APART, mask=lane < count, other=0, volatile=True)
            behind = tl.max(((seen != turn) & (lane < count)).to(tl.int32), 0)
            if INTERPRETED:
                spent += SPIN_NS
            else:
                spent = globaltimer() - begin
            if behind == 1:
                # Each thread has a lane of its own, and reads clock and fault at another time: all go by one
                # answer.
                lost = tl.load(faults + lane * 0, volatile=True) & PEER
                if tl.max(((spent + lane > patience_ns) | (lost != 0)).to(tl.int32), 0) == 1:
                    report(faults, PEER)
                    behind = 2
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def tell(bases, at, turn, rank, faults, RANKS: tl.constexpr):
    """Stores the turn at byte `at` of every rank's memory, after all that this program wrote.

    A rank that waited in vain tells nothing: what it has is not what the others wait for.
    """
    tl.debug_barrier()
    if (tl.load(faults, volatile=True) & PEER) == 0:
        if not INTERPRETED:
            tl.inline_asm_elementwise(_FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        for step in tl.static_range(RANKS):
            # The others first: they wait.
            flag = tl.load(bases + (rank + 1 + step) % RANKS) + at
            if INTERPRETED:
                tl.store(flag.to(tl.pointer_type(tl.int64)), turn)
            else:
                tl.inline_asm_elementwise(
                    _STORE, "=r,l,l", [flag, turn], dtype=tl.int32, is_pure=False, pack=1
                )
