"""Cases of `bench kernels`: edits, draws, log probabilities, verification and the Markov head's step.

A row's draw reads its logits once: that is the floor of all draws. Logits fall off with the square of a
token's rank, so that some hundred tokens hold nearly all mass; of the flat ones that are searched, none do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.kernel_cases import Case, copies, distance
from engine.kernels.triton import draws, logits, logits_best, markov, masks
from engine.kernels.triton.accept_rows import VerifiedRows
from engine.messages import Sampling
from engine.model.group_stats import GroupStats
from engine.runner.edits import forbid
from engine.runner.parameters import KEY, TOP_K, SlotParameters, features_of
from engine.runner.penalties import TokenCounts
from engine.runner.sampling import Rows, Sampler

VOCABULARY, RANK, BEST = 129_280, 256, 20
WORDS = VOCABULARY // 32
COMPARED = 8
"""Rows that the plain code draws from, too: its sort of a whole vocabulary takes milliseconds."""
SAMPLINGS = {
    "greedy": (Sampling(64, temperature=0.0), 2.0),
    "whole": (Sampling(64), 2.0),
    "top-k 50, top-p 0.95": (Sampling(64, top_k=50, top_p=0.95), 2.0),
    "top-p 0.95": (Sampling(64, top_p=0.95), 2.0),
    "min-p 0.05": (Sampling(64, min_p=0.05), 2.0),
    "top-p 0.95, flat": (Sampling(64, top_p=0.95), 0.3),
}


def falling(rows: int, power: float) -> Tensor:
    """Logits [rows, V] whose weights fall off with this power of a token's rank."""
    return torch.empty(rows, VOCABULARY, device="cuda").exponential_() * power


def slots_of(sampling: Sampling, rows: int) -> SlotParameters:
    """Slots 1 .. rows, each of a request with these parameters and another key."""
    made = SlotParameters(rows + 1, VOCABULARY, (1,), torch.device("cuda"))
    features = features_of(sampling, 1, VOCABULARY)
    made.features = [features] * (rows + 1)
    made.floats[:] = torch.tensor(
        [
            sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
            sampling.frequency_penalty, sampling.presence_penalty,
        ],
        device="cuda",
    )  # fmt: skip
    made.ints[:, KEY] = torch.randint(-(2**62), 2**62, (rows + 1,), device="cuda")
    made.ints[:, TOP_K] = features.top_k
    return made


def sets(rows: int, power: float) -> list[Tensor]:
    """Logits that the caches don't hold together."""
    return [falling(rows, power) for _ in range(copies(4.0 * rows * VOCABULARY, 2, 16))]


def draw_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Statistics alone, and whole draws under several parameters."""
    for rows in row_counts:
        size, shape = 4.0 * rows * VOCABULARY, f"[{rows}, {VOCABULARY}]"
        given = sets(rows, 2.0)
        error = distance(logits.group_stats(given[0]).tops.amax(1), given[0].amax(1))
        calls = [lambda x=x: logits.group_stats(x) for x in given]
        library = [lambda x=x: x.logsumexp(1) for x in given]
        yield Case("group_stats", shape, rows, calls, size, 0, "bf16", "logsumexp", library, error, 0.0)
        for name, (sampling, power) in SAMPLINGS.items():
            given = sets(rows, power)
            parameters, slots = slots_of(sampling, rows), torch.arange(1, rows + 1, device="cuda")
            known = (slots, slots * 7, parameters.floats, parameters.ints)
            calls = [lambda x=x, k=known: draws.sample(x, *k) for x in given]
            some = min(rows, COMPARED)
            numbers = tuple(range(1, some + 1))
            wanted = Sampler(parameters, TokenCounts(1, 1, given[0].device)).choose(
                given[0][:some],
                Rows(numbers, tuple(7 * n for n in numbers)),
                parameters.features[1 : some + 1],
            )
            wrong = float((draws.sample(given[0], *known).tokens[:some] != wanted.tokens).sum())
            yield Case(
                f"sample {name}", shape, rows, calls, size, 0, "bf16", *_library(name, given), wrong, 0.0
            )


def _library(name: str, given: list[Tensor]) -> tuple[str, list[Callable[[], object]]]:
    """What torch has for the same: no counter-based numbers, and ties in any order."""
    if name == "greedy":
        return "argmax", [lambda x=x: x.argmax(1) for x in given]
    if name.startswith("top-k"):
        return "topk", [lambda x=x: x.topk(50, 1) for x in given]
    if name == "whole":
        return "softmax, exponential, argmax", [
            lambda x=x: x.softmax(1).div_(torch.empty_like(x).exponential_()).argmax(1) for x in given
        ]
    return "sort", [lambda x=x: x.sort(1, descending=True) for x in given]


def edit_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Grammar masks alone, and with penalties; statistics of the result in the same pass."""
    for rows in row_counts:
        given = sets(rows, 2.0)
        lines = torch.arange(rows, device="cuda")
        words = torch.randint(-(2**31), 2**31 - 1, (rows, WORDS), device="cuda", dtype=torch.int32)
        given_masks, room = masks.RowMasks(words, lines), logits.new_stats(given[0])
        for name, sampling in (
            ("masks", Sampling(64)),
            ("masks and penalties", Sampling(64, repetition_penalty=1.1)),
        ):
            parameters = slots_of(sampling, rows)
            tables = _tables(parameters, rows)
            described = VerifiedRows(lines + 1, lines, lines, torch.zeros_like(lines))
            out, wanted = given[0].clone(), given[0].clone()
            masks.edit(out, described, tables, None, given_masks, room)
            if name != "masks":
                seen = tables.seen[1:] > 0
                wanted = torch.where(seen, torch.where(wanted > 0, wanted / 1.1, wanted * 1.1), wanted)
            forbid(wanted, lines, words)
            error = distance(out.nan_to_num(neginf=-1e4), wanted.nan_to_num(neginf=-1e4))
            calls = [
                lambda x=x, d=described, t=tables, m=given_masks, s=room: masks.edit(x, d, t, None, m, s)
                for x in given
            ]
            library = [lambda x=x, w=words, n=lines: forbid(x, n, w) for x in given]
            size = rows * VOCABULARY * (8.125 + 4 * (name != "masks"))
            shape = f"[{rows}, {VOCABULARY}]"
            yield Case(f"edit {name}", shape, rows, calls, size, 0, "bf16", "forbid", library, error, 1e-6)


def _tables(parameters: SlotParameters, rows: int) -> masks.EditTables:
    """Edits of slots that have neither bias nor stops; each has seen a thousandth of all tokens."""

    def none(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device="cuda")

    seen = (torch.rand(rows + 1, VOCABULARY, device="cuda") < 1e-3).int()
    one, few = none(rows + 1), none(rows + 1, 1)
    return masks.EditTables(
        parameters.floats, seen, few, few.float(), one, few, one, none(rows + 1, dtype=torch.int64)
    )


def best_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """Log probabilities without and with the best tokens."""
    for rows in row_counts:
        given, tokens = sets(rows, 2.0), torch.arange(rows, device="cuda")
        for most in (0, BEST):
            calls = [lambda x=x, t=tokens, m=most: logits_best.best_logprobs(x, t, m) for x in given]
            library = [lambda x=x, m=most: (x.logsumexp(1), x.topk(m, 1) if m else None) for x in given]
            chosen, _, values = logits_best.best_logprobs(given[0], tokens, most)
            right = given[0].log_softmax(1)
            error = distance(chosen, right.gather(1, tokens[:, None])[:, 0])
            error += distance(values, right.topk(most, 1)[0]) if most else 0.0
            size, shape = 4.0 * rows * VOCABULARY, f"[{rows}, {VOCABULARY}], {most} best"
            yield Case(
                "best_logprobs", shape, rows, calls, size, 0, "bf16", "logsumexp, topk", library, error, 1e-5
            )


@dataclass(frozen=True)
class _Step:
    """One position of a draft: its logits, the tokens before it, and where its results go."""

    logits: Tensor
    previous: Tensor
    stats: GroupStats
    choosers: markov.Choosers
    ids: Tensor

    def run(self, w1: Tensor, w2: Tensor) -> None:
        """By the kernels."""
        slots, floats = self.choosers.slots, self.choosers.floats
        markov.add_bias(self.logits, w1, w2, self.previous, self.stats, slots, floats)
        markov.choose(self.logits, self.stats, self.choosers, 0, self.ids)

    def plain(self, w1: Tensor, w2: Tensor) -> Tensor:
        """By torch, greedily."""
        return self.logits.add_(w1.index_select(0, self.previous) @ w2.t()).argmax(1)


def markov_cases(row_counts: tuple[int, ...]) -> Iterator[Case]:
    """One position of the Markov head's loop: bias, statistics and choice; W2 alone fills the cache."""
    pairs = [
        [torch.randn(VOCABULARY, RANK, device="cuda").bfloat16() * RANK**-0.25 for _ in range(2)]
        for _ in range(4)
    ]
    for rows in row_counts:
        x = falling(rows, 2.0)
        parameters, previous = slots_of(Sampling(64), rows), torch.arange(rows, device="cuda") * 97
        slots = torch.arange(1, rows + 1, device="cuda")
        choosers = markov.Choosers(slots, slots, parameters.floats, parameters.ints, None)
        stats, ids = logits.group_stats(x), torch.empty_like(slots)

        given = _Step(x, previous, stats, choosers, ids)
        wanted = x + pairs[0][0].float().index_select(0, previous) @ pairs[0][1].float().t()
        given.run(*pairs[0])
        error = distance(x, wanted)
        size = 2.0 * RANK * (VOCABULARY + rows) + 8.0 * rows * VOCABULARY
        yield Case(
            "markov step", f"[{rows}, {RANK}] x [{VOCABULARY}, {RANK}]", rows,
            [lambda p=p, g=given: g.run(*p) for p in pairs], size, 2.0 * rows * RANK * VOCABULARY, "bf16",
            "torch bf16, argmax", [lambda p=p, g=given: g.plain(*p) for p in pairs], error, 1e-4,
        )  # fmt: skip
