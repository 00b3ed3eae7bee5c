"""Pool rows of the compressed entries that query blocks see, from their requests' pages.

Once a step, for all layers: the host sends a page number for 64 (c4) or 2 (c128) entries, not a row for each.
Source: `engine.runner.blocks` states it.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.kernels.triton.faults import KEY_ROW, LENGTH, any_of, flag, report
from engine.kernels.triton.launch import ahead, await_previous

ENTRIES = 1024
"""Of a program."""


@triton.jit(do_not_specialize=["columns", "entries"], do_not_specialize_on_alignment=["pages", "visible"])
def _entry_rows(
    pages, visible, out, faults, columns, pool_pages, entries, PAGE: tl.constexpr, WIDE: tl.constexpr
):
    await_previous()
    block = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    seen = tl.load(visible + block).to(tl.int32)
    real = entry < tl.minimum(seen, entries)
    page = tl.load(pages + block * columns + entry // PAGE, mask=real, other=1).to(tl.int32)
    mapped = (page > 0) & (page < pool_pages)
    report(faults, flag(any_of(mapped == 0), KEY_ROW) | flag((seen < 0) | (seen > entries), LENGTH))
    row = tl.where(real & mapped, page * PAGE + entry % PAGE, 0)
    tl.store(out + block * entries + entry, row, mask=entry < entries)


def entry_rows(
    pages: Tensor, visible: Tensor, entries: int, page_rows: int, pool_pages: int, faults: Tensor
) -> Tensor:
    """Pool rows of each block's first entries; int32 [blocks, N], 0 from the block's last visible entry on.

    pages       int32 or int64 [blocks, M]: page numbers of each block's request, in order
    visible     int32 or int64 [blocks]: entries that any query of the block sees
    entries     N, at most M page_rows
    page_rows   entries of a page: 64 or 2
    pool_pages  pages of the pool, the sink included
    faults      int32 [1]: KEY_ROW is added for a page outside the pool or the sink, whose entries get row 0;
                LENGTH for a block that sees more than N
    raises      ShapeMismatch
    """
    blocks, columns = pages.shape
    even = pages.is_contiguous() and visible.is_contiguous()
    if entries > columns * page_rows or tuple(visible.shape) != (blocks,) or not even:
        raise ShapeMismatch(
            f"{entries} entries of pages {tuple(pages.shape)}, visible {tuple(visible.shape)}"
        )
    out = torch.empty(blocks, entries, dtype=torch.int32, device=pages.device)
    if out.numel():
        _entry_rows[(blocks, triton.cdiv(entries, ENTRIES))](
            pages, visible, out, faults, columns, pool_pages, entries, page_rows, ENTRIES, **ahead(blocks)
        )
    return out
