"""What a step must read and compute at least, by its weights and contexts: the formula of the floor.

Bytes: every weight of the layers once, of routed experts those that the step's rows chose on this rank, of
hash tables the rows' lines; the head where logits are wanted; of each request the window, its compressed
entries (of c4 layers as many as are selected), and where it selects all its index keys, in the caches' own
types. Operations: two for each weight and row, attention and indexer likewise. Not counted: activations, what
is written, what travels between ranks; a floor may be low, never high.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

from torch import Tensor

from bench.step_case import Case
from engine.memory.pools import KVState
from engine.model.config import C4, C128, ModelConfig
from engine.model.expert_weights import ExpertWeights, MoeWeights
from engine.model.model import DeepseekV4
from engine.model.quantised import Fp4Experts, Fp8Weight


@dataclass(frozen=True)
class Routed:
    """One layer's choices on this rank: distinct experts among them, and how many there are."""

    distinct: int
    choices: int


@dataclass(frozen=True)
class Work:
    """Bytes that must be read; operations of products with quantised weights, and of all others."""

    bytes: float
    quantised: float
    floats: float

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.quantised + other.quantised, self.floats + other.floats)


NOTHING = Work(0.0, 0.0, 0.0)


def step_work(model: DeepseekV4, state: KVState, case: Case, routed: Sequence[Routed]) -> Work:
    """Of one step on this rank; routed: one entry a layer."""
    rows, logits = case.requests * case.width, case.requests * (1 if case.kind == "prefill" else case.width)
    total = Work(rows * model.config.hidden_size * model.embed.element_size(), 0.0, 0.0)
    total += weights_work(model.head, logits)
    for number, (layer, chosen) in enumerate(zip(model.layers, routed, strict=True)):
        total += weights_work(layer.weights, rows) + experts_work(layer.weights.moe, chosen)
        total += context_work(model.config, state, number, case)
    return total


def weights_work(part: object, rows: int) -> Work:
    """Dense weights of a layer or the head; routed experts and tables excepted."""
    if isinstance(part, Fp8Weight):
        return Work(part.nbytes, 2.0 * rows * part.codes.numel(), 0.0)
    if isinstance(part, Tensor):
        products = part.numel() if part.dim() >= 2 else 0
        return Work(part.nbytes, 0.0, 2.0 * rows * products)
    if isinstance(part, ExpertWeights | Fp4Experts) or not is_dataclass(part):
        return NOTHING
    total = NOTHING
    for field in fields(part):
        if (isinstance(part, MoeWeights) and field.name == "table") or field.name == "ape":
            continue
        total += weights_work(getattr(part, field.name), rows)
    return total


def experts_work(moe: MoeWeights, chosen: Routed) -> Work:
    """Of the experts that rows chose, and of the lines of a hash table."""
    own = moe.routed
    quantised = isinstance(own, Fp4Experts)
    if isinstance(own, Fp4Experts):
        count, size, values = own.count, own.nbytes, 3 * own.hidden * own.inner
    else:
        count, size = own.w13.shape[0], own.w13.nbytes + own.w2.nbytes
        values = (own.w13.numel() + own.w2.numel()) // count
    operations = 2.0 * chosen.choices * values
    line = 0 if moe.table is None else 8 * chosen.choices
    return Work(
        chosen.distinct * size / count + line,
        operations if quantised else 0.0,
        0.0 if quantised else operations,
    )


def context_work(config: ModelConfig, state: KVState, layer: int, case: Case) -> Work:
    """Keys of every request, and the products with them."""
    ratio, heads, wide = config.compress_ratios[layer], config.num_attention_heads, config.head_dim
    cache = state.layer(layer)
    total = NOTHING
    for length in case.lengths():
        end = length + case.width
        window = min(end, config.sliding_window + case.width - 1)
        entries = end // ratio if ratio else 0
        seen = min(entries, config.index_topk) if ratio == C4 else entries
        size = window * row_bytes(cache.window)
        pool = cache.c4 if ratio == C4 else cache.c128
        size += 0 if pool is None else seen * row_bytes(pool)
        # A row sees half of what comes with it, on average.
        near = min(config.sliding_window, length + case.width / 2)
        far = seen if ratio == C4 else entries - case.width / 2 / C128 if ratio == C128 else 0
        operations = 4.0 * case.width * heads * wide * (near + far)
        if ratio == C4 and entries > config.index_topk:
            assert cache.index is not None
            size += entries * (row_bytes(cache.index) + (0 if cache.index_scales is None else 4))
            index = config.index_n_heads * config.index_head_dim
            operations += 2.0 * case.width * index * (entries - case.width / 2 / C4)
        total += Work(size, 0.0, operations)
    return total


def row_bytes(pool: Tensor) -> int:
    """Bytes of one row of a cache."""
    return pool.shape[-1] * pool.element_size()
