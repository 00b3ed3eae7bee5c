"""Cases of `bench kernels`: attention over pools, RMSNorm and rotation of heads, storing of latents.

Shapes are DeepSeek-V4-Flash's. Up to 64 rows are requests that decode, 128 rows are requests that verify
eight rows each, more are a chunk of one prompt in blocks of 32 rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from bench.kernel_cases import BF16, Case, copies, distance
from engine.kernels.triton import oracle_attention
from engine.kernels.triton.attend import APART, FEW, MANY, WIDE, AttendShape, attend
from engine.kernels.triton.faults import check_faults, no_faults
from engine.kernels.triton.rope import q_norm_rope, rotate
from engine.kernels.triton.store import norm_rope_store
from engine.model.keys import Keys, SeenKeys
from engine.model.latent_rows import pack_rows, unpack_rows
from engine.model.ops import TorchOps
from engine.model.row_layout import V4_ROW

DEVICE = "cuda"
HEADS, WINDOW, TOP, EPS = 64, 128, 512, 1e-6
POOL_ROWS = 1 << 18
"""A quarter of a gigabyte of bfloat16 latents: rows drawn from it are in no cache."""
ENTRIES = {"64k": 512, "1M": 8192}
"""c128 entries at these contexts."""
WHOLE_TILES = AttendShape(64, 64, 0, 8, 3)
"""Of bfloat16 there is no room for more stages."""
CUTS = {
    torch.bfloat16: (FEW[torch.bfloat16], MANY[torch.bfloat16], WHOLE_TILES),
    torch.uint8: (FEW[torch.uint8], MANY[torch.uint8], APART),
}
"""What is tried beside the cut that attention takes by itself, each with several sizes of parts."""


def width_of(rows: int) -> int:
    """Rows of a query block."""
    return 1 if rows <= 64 else 8 if rows < 1024 else 32


def drawn(lists: int, columns: int) -> Tensor:
    """Random pool rows [lists, columns]."""
    return torch.randint(1, POOL_ROWS, (lists, columns), device=DEVICE)


def ranges(rows: int, first: Tensor, count: int) -> Tensor:
    """int32 [rows, 2]."""
    return torch.stack([first.expand(rows), torch.full((rows,), count, device=DEVICE)], 1).int().contiguous()


def window_of(pool: Tensor, rows: int) -> SeenKeys:
    """The window of every row, which blocks share."""
    width = width_of(rows)
    first = torch.arange(rows, device=DEVICE) % width
    return SeenKeys(pool, drawn(rows // width, width + WINDOW - 1), ranges(rows, first, WINDOW))


def shared(pool: Tensor, rows: int, count: int) -> SeenKeys:
    """Entries that a block's rows all see."""
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return SeenKeys(pool, drawn(rows // width_of(rows), count), ranges(rows, zero, count))


def attend_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """The three sorts of layers, over bfloat16 and FP8 pools; the inverse rotation is part of it."""
    latents = torch.randn(POOL_ROWS, WIDE, device=DEVICE).bfloat16()
    latents[0] = 0
    for pool in (latents, pack_rows(latents, V4_ROW)):
        for rows in row_counts:
            yield attend_case(pool, rows, "window", 0, None)
            yield attend_case(pool, rows, "c4", TOP, None)
            yield attend_case(pool, rows, "c128 64k", ENTRIES["64k"], None)
            if rows <= 64:
                yield attend_case(pool, rows, "c128 1M", ENTRIES["1M"], None)
                for cut in CUTS[pool.dtype]:
                    for tiles in (0, 1, 2, 4):
                        yield attend_case(pool, rows, "c4", TOP, replace(cut, tiles=tiles))


def attend_case(pool: Tensor, rows: int, layer: str, entries: int, cut: AttendShape | None) -> Case:
    """One size of one sort of layer, as it is cut by itself (None) or by `cut`."""
    width, sink, faults = width_of(rows), torch.randn(HEADS, device=DEVICE), no_faults(DEVICE)
    back = turns_of(rows)
    row_bytes = pool.stride(0) * pool.element_size()
    lists = rows if layer == "c4" else rows // width
    size = float(rows // width * (width + WINDOW - 1) + lists * entries) * row_bytes
    size += 4.0 * rows * HEADS * WIDE
    sets = []
    for _ in range(copies(size, 2, 16)):
        far = (
            SeenKeys(pool, drawn(rows, entries).int(), None) if layer == "c4" else shared(pool, rows, entries)
        )
        q = torch.randn(rows // width, width, HEADS, WIDE, device=DEVICE).bfloat16()
        sets.append((q, window_of(pool, rows), far if entries else None))
    out = attend(*sets[0], sink, faults, back, shape=cut)
    error = distance(out, oracle_attention.attend(*sets[0], sink, back))
    check_faults(int(faults))
    calls = [lambda s=s: attend(*s, sink, faults, back, shape=cut) for s in sets]
    library = []
    if layer == "c4" and pool.dtype == torch.bfloat16 and rows <= 64 and cut is None:
        library = [lambda s=s: gathered(*s, sink, back) for s in sets]
    name = f"attend {layer}" + (" FP8" if pool.dtype == torch.uint8 else "")
    told = f" cut {cut.heads} x {cut.keys}, {cut.tiles} tiles" if cut and layer == "c4" else ""
    operations = 4.0 * rows * HEADS * WIDE * (WINDOW + entries)
    return Case(
        name, f"[{rows}, {HEADS}, {WIDE}], {WINDOW} + {entries} keys{told}", rows, calls, size, operations,
        "bf16", "torch, gathered", library, error, BF16,
    )  # fmt: skip


def gathered(q: Tensor, window: SeenKeys, far: SeenKeys | None, sink: Tensor, back: Tensor) -> Tensor:
    """The same by plain torch, keys copied together; only where queries see all of their lists."""
    parts = [
        Keys(keys.pool, keys.rows, torch.zeros(*q.shape[:2], keys.rows.shape[1], device=DEVICE))
        for keys in (window, far) if keys is not None
    ]  # fmt: skip
    out = TorchOps().attend(q, parts[0], parts[1] if len(parts) > 1 else None, sink)
    TorchOps().rotate(out.flatten(0, 1), back)
    return out


def turns_of(rows: int) -> Tensor:
    """Random rotations complex64 [rows, 1, 32]."""
    angles = torch.randn(rows, 1, V4_ROW.rotary // 2, device=DEVICE)
    return torch.polar(torch.ones_like(angles), angles)


def rope_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Norm and rotation of queries, rotation alone, storing of latents; against torch."""
    ops, weight = TorchOps(), torch.rand(WIDE, device=DEVICE)
    for rows in row_counts:
        by, shape = turns_of(rows), f"[{rows}, {HEADS}, {WIDE}]"
        wide = 4.0 * rows * HEADS * WIDE
        qs = [torch.randn(rows, HEADS, WIDE, device=DEVICE).bfloat16() for _ in range(copies(wide, 2, 16))]
        out, wanted = qs[0].clone(), ops.rms_norm(qs[0], None, EPS)
        ops.rotate(wanted, by)
        q_norm_rope(out, by, EPS)
        error = distance(out, wanted)
        calls = [lambda q=q, by=by: q_norm_rope(q, by, EPS) for q in qs]
        library = [lambda q=q, by=by: ops.rotate(ops.rms_norm(q, None, EPS), by) for q in qs]
        yield Case("q_norm_rope", shape, rows, calls, wide, 0, "bf16", "torch", library, error, 1e-3)
        before, out = out.clone(), out.clone()
        ops.rotate(before, by)
        rotate(out, by)
        error = distance(out, before)
        calls = [lambda q=q, by=by: rotate(q, by) for q in qs]
        library = [lambda q=q, by=by: ops.rotate(q, by) for q in qs]
        yield Case("rotate", shape, rows, calls, wide / 8, 0, "bf16", "torch", library, error, 1e-3)
        yield from store_cases(rows, by, weight)


def store_cases(rows: int, by: Tensor, weight: Tensor) -> Iterator[Case]:
    """Latents into bfloat16 and FP8 pools."""
    ops, faults = TorchOps(), no_faults(DEVICE)
    places = 1 + torch.randperm(POOL_ROWS - 1, device=DEVICE)[:rows]
    xs = [torch.randn(rows, WIDE, device=DEVICE).bfloat16() for _ in range(16)]
    wanted = ops.rms_norm(xs[0], weight, EPS)
    ops.rotate(wanted.unsqueeze(1), by)
    plain = torch.zeros(POOL_ROWS, WIDE, dtype=torch.bfloat16, device=DEVICE)
    coded = torch.zeros(POOL_ROWS, V4_ROW.row_bytes, dtype=torch.uint8, device=DEVICE)
    for pool, tolerance in ((plain, 1e-3), (coded, 1e-2)):
        norm_rope_store(xs[0], weight, by, pool, places, EPS, faults, False)
        out, right = pool[places], wanted
        if pool is coded:
            out = unpack_rows(out, V4_ROW)
            right = unpack_rows(pack_rows(wanted, V4_ROW), V4_ROW)
        calls = [
            lambda x=x, p=pool: norm_rope_store(x, weight, by, p, places, EPS, faults, False) for x in xs
        ]
        size = float(rows * (2 * WIDE + pool.stride(0) * pool.element_size()))
        name = "norm_rope_store" + (" FP8" if pool is coded else "")
        error = distance(out, right)
        yield Case(name, f"[{rows}, {WIDE}]", rows, calls, size, 0, "bf16", "", [], error, tolerance)
    check_faults(int(faults))
