"""Cases of `bench kernels`: closing and committing entries, scoring them, selecting from them.

Shapes are DeepSeek-V4-Flash's at 65,536 tokens of context: 16,384 entries a query. Up to 64 rows are requests
that decode, 128 rows are requests that verify eight rows each, more are a chunk of one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernel_cases import BF16, Case, copies, distance
from engine.kernels.triton import oracle_compress as oracle
from engine.kernels.triton.compress_c4 import close_c4
from engine.kernels.triton.compress_c128 import close_c128
from engine.kernels.triton.compress_commit import Committed, commit_c4, commit_c128
from engine.kernels.triton.compress_entry import IndexPool
from engine.kernels.triton.entry_rows import entry_rows
from engine.kernels.triton.faults import check_faults, no_faults
from engine.kernels.triton.index_queries import code_queries, round_queries
from engine.kernels.triton.index_scores import index_scores
from engine.kernels.triton.select_entries import select_in_order
from engine.model.keys import Keys
from engine.model.ops import TorchOps
from engine.model.row_layout import V4_ROW
from engine.model.step import C4Entries, C128Entries

DEVICE = "cuda"
WIDE, KEY, ROTARY, HEADS = 512, 128, 64, 64
ENTRIES, TOP, PAGE, LAYERS = 16384, 512, 64, 20
POOL_ROWS, SLOTS, EPS = 1 << 16, 256, 1e-6
CODED, FP32 = 1e-2, 1e-5
FP8_SUMS = 1e-3
"""The matrix unit keeps 14 bits of sums in FP8."""


def drawn(*shape: int) -> Tensor:
    """Normal float32 values."""
    return torch.randn(*shape, device=DEVICE)


def ints(count: int, most: int) -> Tensor:
    """int64 [count], different ones from 1 to most - 1."""
    return 1 + torch.randperm(most - 1, device=DEVICE)[:count]


def turns_of(count: int) -> Tensor:
    """Random rotations complex64 [count, 1, 32]."""
    angles = drawn(count, 1, ROTARY // 2)
    return torch.polar(torch.ones_like(angles), angles)


def close_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Entries that close: a quarter of the rows' c4 windows; c128 windows that are whole, or take one row."""
    both, faults = WIDE + KEY, no_faults(DEVICE)
    latents = torch.zeros(POOL_ROWS, WIDE, dtype=torch.bfloat16, device=DEVICE)
    coded = torch.zeros(POOL_ROWS, V4_ROW.row_bytes, dtype=torch.uint8, device=DEVICE)
    keys = IndexPool(torch.zeros(POOL_ROWS, KEY, dtype=torch.bfloat16, device=DEVICE))
    key_codes = torch.zeros(POOL_ROWS, KEY, device=DEVICE).to(torch.float8_e4m3fn)
    coded_keys = IndexPool(key_codes, scales=torch.zeros(POOL_ROWS, device=DEVICE))
    ring, states = drawn(SLOTS * 8, 4 * both), drawn(SLOTS, 3, WIDE).abs()
    norm, index_norm = drawn(WIDE), drawn(KEY)
    for rows in row_counts:
        count = max(1, rows // 4)
        # Half rows of the step, which stand after the eight rows of a ring.
        halves = 16 + torch.arange(count * 8, device=DEVICE).view(count, 8) % (2 * rows)
        entries = C4Entries(
            torch.arange(8, device=DEVICE), halves,
            torch.zeros(count, 8, 1, device=DEVICE), ints(count, POOL_ROWS), ints(count, POOL_ROWS),
        )  # fmt: skip
        turns, size = turns_of(count), count * 8 * 2 * both * 4
        sets = [drawn(rows, 4 * both) for _ in range(copies(size, 2, 32))]
        for pool, index in ((latents, keys), (coded, coded_keys)):
            rest = (entries, turns, norm, index_norm, EPS, pool, index)
            close_c4(ring, sets[0], *rest, faults, False)
            right = oracle.close_c4(ring, sets[0], *rest, False)
            error = distance(oracle.read_latents(pool, entries.out_rows, ROTARY), right[0])
            error += distance(oracle.read_keys(index, entries.out_rows), right[1])
            out = count * (pool.stride(0) * pool.element_size() + KEY * index.values.element_size())
            calls = [lambda p=p, a=rest: close_c4(ring, p, *a, faults, False) for p in sets]
            name = "close_c4" + (" FP8" if pool is coded else "")
            yield Case(name, f"{count} entries", rows, calls, size + out, 0, "bf16", "", [], error, CODED)
        yield c128_case(rows, states, norm, latents, faults)
    check_faults(int(faults))


def c128_case(rows: int, states: Tensor, norm: Tensor, pool: Tensor, faults: Tensor) -> Case:
    """Whole windows of a chunk, or one that its last row closes."""
    count, taken = max(1, rows // 128), min(128, rows) if rows >= 128 else 1
    column = torch.arange(count, device=DEVICE)
    fresh, counts = torch.full((count,), taken == 128, device=DEVICE), torch.full_like(column, taken)
    entries = C128Entries(
        ints(count, SLOTS), fresh, column * taken, counts, ints(count, POOL_ROWS), column * 128, taken
    )
    turns, size = (
        turns_of(count),
        count * (taken * 2 * WIDE * 4 + (0 if taken == 128 else 12 * WIDE) + 2 * WIDE),
    )
    sets = [drawn(count * taken, 2 * WIDE) for _ in range(copies(size, 2, 32))]
    close_c128(states, sets[0], entries, turns, norm, EPS, pool, faults, False)
    right = oracle.close_c128(
        states, sets[0], entries.slots, fresh, entries.firsts, counts, turns, norm, EPS, pool, False
    )
    error = distance(oracle.read_latents(pool, entries.out_rows, ROTARY), right)
    calls = [lambda p=p: close_c128(states, p, entries, turns, norm, EPS, pool, faults, False) for p in sets]
    return Case("close_c128", f"{count} of {taken} rows", rows, calls, size, 0, "bf16", "", [], error, BF16)


def commit_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """All layers' states: one row a request, or a chunk's last rows."""
    faults, both = no_faults(DEVICE), WIDE + KEY
    states, ring = drawn(LAYERS, SLOTS, 3, WIDE).abs(), drawn(LAYERS, SLOTS * 8, 4 * both)
    for rows in row_counts:
        count = rows if rows <= 128 else 1
        lens = torch.full((count,), rows // count, device=DEVICE)
        starts = torch.randint(1, 100, (count,), device=DEVICE) * 128 + 37
        step = Committed(ints(count, SLOTS), starts, lens.cumsum(0) - lens, lens, lens)
        columns = (step.slots, step.starts, step.firsts, step.lens)
        folded = 1 if rows <= 128 else (37 + rows) % 128
        copied, kept = 2 * min(8, rows // count) * 4 * both, (6 + 2 * folded) * WIDE
        for name, kernel, state, width, own, plain in (
            ("commit_c128", commit_c128, states, 2 * WIDE, kept, oracle.commit_c128),
            ("commit_c4", commit_c4, ring, 4 * both, copied, oracle.commit_c4),
        ):
            pending = drawn(LAYERS, rows, width)
            right = plain(state, pending, *columns)
            kernel(state, pending, step, faults)
            error = distance(state, right)
            calls = [lambda k=kernel, a=(state, pending, step, faults): k(*a)] * 4
            size = 4.0 * LAYERS * count * own
            yield Case(
                name, f"{LAYERS} layers, {count} requests", rows, calls, size, 0, "bf16", "", [], error, FP32
            )
    check_faults(int(faults))


def widths(rows: int) -> tuple[int, int]:
    """Blocks and their width for so many rows."""
    width = 1 if rows <= 64 else 8 if rows <= 128 else 32
    return rows // width, width


def entry_lists(blocks: int, width: int, pool_rows: int) -> list[Tensor]:
    """Pool rows [blocks, N] of whole pages, several sets of them; the blocks of a chunk share theirs."""
    lists = 1 if width == 32 else blocks
    out = []
    for _ in range(copies(256.0 * lists * ENTRIES, 2, 16)):
        page = torch.randint(1, pool_rows // PAGE, (lists, ENTRIES // PAGE, 1), device=DEVICE)
        rows = (page * PAGE + torch.arange(PAGE, device=DEVICE)).flatten(1)
        out.append(rows.expand(blocks, -1).contiguous())
    return out


def score_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Queries, their scores of every entry, and selection."""
    keys = drawn(1 << 20, KEY).bfloat16()
    codes, scales = keys.to(torch.float8_e4m3fn), drawn(1 << 20).abs()
    for rows in row_counts:
        blocks, width = widths(rows)
        lists = entry_lists(blocks, width, len(keys))
        q, weights = drawn(blocks, width, HEADS, KEY).bfloat16(), drawn(blocks, width, HEADS)
        yield from query_cases(q.flatten(0, 1), weights.flatten(0, 1))
        yield score_case((q, weights, keys, None), lists, "bf16")
        yield score_case((q.to(torch.float8_e4m3fn), weights, codes, scales), lists, "fp8")
        yield select_case(rows)
        yield rows_case(blocks, rows)


def score_case(given: tuple[Tensor, Tensor, Tensor, Tensor | None], lists: list[Tensor], rate: str) -> Case:
    """Scores of queries, weights, keys and their scales `given`."""
    q, weights, keys, scales = given
    ops, faults, (blocks, width) = TorchOps(), no_faults(DEVICE), q.shape[:2]
    seen = torch.full((blocks, width), ENTRIES, device=DEVICE)
    few = (q[:2], weights[:2], keys, scales, lists[0][:2], seen[:2])
    error = distance(index_scores(*few, faults), oracle.index_scores(*few))
    check_faults(int(faults))
    calls = [lambda r=r: index_scores(*given, r, seen, faults) for r in lists]
    bias = torch.zeros(1, 1, ENTRIES, device=DEVICE)
    # The library's form writes every head's scores: it is left out where they fill the device's memory.
    plain = lists if scales is None and blocks * width <= 64 else []
    library = [lambda r=r: ops.index_scores(q, weights, Keys(keys, r, bias)) for r in plain]
    one = KEY * keys.element_size() + (0 if scales is None else 4)
    size = (1 if width == 32 else blocks) * ENTRIES * one + 8.0 * blocks * ENTRIES
    return Case(
        "index_scores" + ("" if scales is None else " FP8"), f"{blocks} x {width}, {ENTRIES}", blocks * width,
        calls, size + 4.0 * blocks * width * ENTRIES, 2.0 * blocks * width * HEADS * KEY * ENTRIES, rate,
        "torch", library, error, FP32 if scales is None else FP8_SUMS,
    )  # fmt: skip


def query_cases(q: Tensor, weights: Tensor) -> Iterator[Case]:
    """Rotation, transform and rounding of queries."""
    rows, turns, shape = len(q), turns_of(len(q)), f"[{len(q)}, {HEADS}, {KEY}]"
    error = distance(round_queries(q, turns), oracle.round_queries(q, turns))
    size = float(q.numel())
    calls = [lambda: round_queries(q, turns)] * 8
    yield Case("round_queries", shape, rows, calls, 4 * size, 0, "bf16", "", [], error, CODED)
    codes, scaled = code_queries(q, turns, torch.ones_like(weights))
    error = distance(codes.float() * scaled.unsqueeze(2), oracle.code_queries(q, turns))
    calls = [lambda: code_queries(q, turns, weights)] * 8
    yield Case("code_queries", shape, rows, calls, 3 * size, 0, "bf16", "", [], error, CODED)


def rows_case(blocks: int, rows: int) -> Case:
    """Pool rows of every block's entries."""
    pages = torch.randint(1, 1 << 14, (blocks, ENTRIES // PAGE), device=DEVICE, dtype=torch.int32)
    visible, faults = torch.full((blocks,), ENTRIES, device=DEVICE), no_faults(DEVICE)
    given = (pages, visible, ENTRIES, PAGE, 1 << 14, faults)
    place = torch.arange(ENTRIES, device=DEVICE)
    wrong = float((entry_rows(*given) != pages[:, place // PAGE] * PAGE + place % PAGE).sum() + faults)
    calls = [lambda: entry_rows(*given)] * 8
    size = 4.0 * (blocks * ENTRIES + pages.numel())
    return Case("entry_rows", f"{blocks} x {ENTRIES}", rows, calls, size, 0, "bf16", "", [], wrong, 0.0)


def select_case(rows: int) -> Case:
    """The best of each row's entries, in order; against the library's, sorted."""
    sets = [drawn(rows, ENTRIES) for _ in range(copies(4.0 * rows * ENTRIES, 2, 16))]
    wrong = float((select_in_order(sets[0], TOP) != TorchOps().select_in_order(sets[0], TOP)).sum())
    calls = [lambda s=s: select_in_order(s, TOP) for s in sets]
    library = [lambda s=s: s.topk(TOP, dim=-1, sorted=False).indices.sort(-1) for s in sets]
    size = rows * (4.0 * ENTRIES + 8.0 * TOP)
    return Case(
        "select_in_order",
        f"{TOP} of {ENTRIES}",
        rows,
        calls,
        size,
        0,
        "bf16",
        "topk, sort",
        library,
        wrong,
        0.0,
    )
