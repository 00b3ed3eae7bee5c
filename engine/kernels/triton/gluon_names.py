"""Names within Gluon, Triton's language of layouts, that differ between the versions this code runs on."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, attr-defined"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

OLD = gl.constexpr(not hasattr(async_copy, "async_load"))
"""Before Triton 3.9."""
copy_ahead = async_copy.async_copy_global_to_shared if OLD.value else async_copy.async_load
barrier = gl.thread_barrier if OLD.value else gl.barrier


@gluon.jit
def recast(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same shared memory as values of another type and shape."""
    if OLD:  # noqa: SIM108 - what isn't compiled needn't exist
        memory = memory._reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        memory = memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    return memory
