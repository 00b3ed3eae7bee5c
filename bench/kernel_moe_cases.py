"""Cases of `bench kernels`: routing, sorting and FP4 experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_cases import HIDDEN, Case, activations, distance
from engine.kernels.triton import experts, oracle, quantise, routing
from engine.model.expert_layout import laid_experts
from engine.model.quantised import Fp4Experts

INNER, EXPERTS, CHOICES = 2048, 256, 6
EXPERTS_BF16 = 1e-2
"""FP8 products are summed in some 14 bits, and an activation near an edge is rounded to the other side."""


def fp4_experts() -> Fp4Experts:
    """Random experts of one layer."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(114, 122, shape, device="cuda", dtype=torch.uint8)

    return laid_experts(
        codes(EXPERTS, 2 * INNER, HIDDEN // 2), scales(EXPERTS, 2 * INNER, HIDDEN // 32),
        codes(EXPERTS, HIDDEN, INNER // 2), scales(EXPERTS, HIDDEN, INNER // 32),
    )  # fmt: skip


def expert_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """All of the routed experts: rounding, sorting, both products, the sum; against bfloat16 grouped_mm."""
    layer = fp4_experts()
    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)
    one = 3 * HIDDEN * INNER * 17 / 32
    for rows in row_counts:
        draws = []
        for _ in range(max(4, min(16, 256 // rows))):
            x = activations(rows, HIDDEN)
            logits, bias = torch.randn(rows, EXPERTS, device="cuda"), torch.zeros(EXPERTS, device="cuda")
            tokens = torch.arange(rows, device="cuda")
            draws.append((x, *routing.route(logits, tokens, bias, None, CHOICES, 1.5)))
        used = sum(len(ids.unique()) for _, ids, _ in draws) / len(draws)
        x, ids, weights = draws[0]
        out = experts.run_experts(x, ids, weights, layer, 10.0)
        error = distance(out, oracle.run_experts(x, ids, weights, layer, 10.0))
        calls = [lambda d=d: experts.run_experts(*d, layer, 10.0) for d in draws]
        library = [lambda d=d: grouped(*d, w13, w2) for d in draws]
        size = used * one + 4 * rows * HIDDEN + 2 * rows * CHOICES * (2 * INNER + 2 * HIDDEN)
        yield Case(
            "experts", f"[{rows}, {HIDDEN}], {used:.0f} of {EXPERTS}", rows, calls, size,
            2.0 * rows * CHOICES * 3 * HIDDEN * INNER, "bf16", "grouped_mm bf16", library, error,
            EXPERTS_BF16,
        )  # fmt: skip
        yield from expert_parts(layer, draws, rows, used * one, error)


def expert_parts(
    layer: Fp4Experts,
    draws: list[tuple[Tensor, Tensor, Tensor]],
    rows: int,
    size: float,
    error: float,
) -> Iterator[Case]:
    """Both products alone; `error` is that of `expert_cases`, which they are part of."""
    cut = experts.shape_for(rows * CHOICES, layer.count)
    parts = []
    for x, ids, weights in draws:
        blocks = routing.sort_choices(ids, EXPERTS, cut.rows)
        near = quantise.quantise_words(x)
        parts.append(
            (near, weights, blocks, experts.gate_up(near, weights, layer, blocks, 10.0, cut.gate_up))
        )
    operations = 2.0 * rows * CHOICES * HIDDEN * INNER
    calls = [lambda p=p: experts.gate_up(p[0], p[1], layer, p[2], 10.0, cut.gate_up) for p in parts]
    shape = f"{rows * CHOICES} choices, blocks of {cut.rows}"
    yield Case(
        "experts gate_up",
        shape,
        rows,
        calls,
        size * 2 / 3,
        2 * operations,
        "fp8",
        "",
        [],
        error,
        EXPERTS_BF16,
    )
    calls = [lambda p=p: experts.down(p[3], layer, p[2], cut.down) for p in parts]
    yield Case("experts down", shape, rows, calls, size / 3, operations, "fp8", "", [], error, EXPERTS_BF16)


def grouped(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """The same by torch's grouped_mm on bfloat16 weights."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    counts.index_add_(0, flat, torch.ones_like(flat))
    ends = counts.cumsum(0, dtype=torch.int32)
    inner = F.grouped_mm(x.index_select(0, order // CHOICES), w13.transpose(1, 2), offs=ends)
    gate, up = inner.float().chunk(2, dim=-1)
    act = F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0) * weights.flatten()[order].unsqueeze(1)
    out = F.grouped_mm(act.to(x.dtype), w2.transpose(1, 2), offs=ends)
    return torch.empty_like(out).index_copy_(0, order, out).view(*ids.shape, -1).sum(1)


def routing_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """The router's choice from logits, and sorting."""
    for rows in row_counts:
        logits, bias = torch.randn(rows, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda")
        tokens = torch.arange(rows, device="cuda")
        ids, weights = routing.route(logits, tokens, bias, None, CHOICES, 1.5)
        wanted, right = oracle.route(logits, tokens, bias, None, CHOICES, 1.5)
        error = distance(weights, right) + float((ids != wanted).sum())

        def plain(logits: Tensor = logits, bias: Tensor = bias) -> Tensor:
            scores = torch.sqrt(F.softplus(logits))
            own = scores.gather(1, (scores + bias).topk(CHOICES, dim=-1).indices)
            return own * (1.5 / own.sum(1, keepdim=True))

        calls = [lambda a=(logits, tokens, bias): routing.route(*a, None, CHOICES, 1.5)] * 16
        size = 4.0 * rows * (EXPERTS + 2 * CHOICES)
        yield Case(
            "route", f"[{rows}, {EXPERTS}]", rows, calls, size, 0, "bf16", "torch", [plain] * 16, error, 1e-5
        )
        calls = [lambda i=ids: routing.sort_choices(i, EXPERTS, 16)] * 16
        wrong = misplaced(ids, routing.sort_choices(ids, EXPERTS, 16))
        size = 8.0 * rows * CHOICES
        yield Case("sort_choices", f"{rows * CHOICES}", rows, calls, size, 0, "bf16", "", [], wrong, 0.0)


def misplaced(ids: Tensor, blocks: routing.Blocks) -> float:
    """How many choices don't stand exactly once, in a block of their expert; all ids name experts."""
    used = blocks.owners >= 0
    slots = blocks.slots[used]
    owners = blocks.owners[used].unsqueeze(1).expand_as(slots)[slots >= 0]
    places = slots[slots >= 0].long()
    seen = torch.bincount(places, minlength=ids.numel())
    return float((seen != 1).sum() + (ids.flatten()[places] != owners).sum())
