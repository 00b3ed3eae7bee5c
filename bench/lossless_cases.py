"""Prompts of many kinds and lengths for `bench lossless`, and the settings under which they run."""

from __future__ import annotations

import itertools
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from api.served import Served
from bench import drafting
from bench.nano import HELDOUT
from training.tasks import KINDS, generate, prompt_ids

PIECE_TOKENS = (1, 2, 5, 17, 40, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 500, 700)
"""Lengths of the pieces of text: around windows, pages and chunks."""

CUTS = (1.0, 0.7, 0.4)
LONGEST_TASK = 640


@dataclass(frozen=True)
class Case:
    """One prompt.

    ids         token ids, int32
    ignore_eos  False: the answer may end by itself, in the middle of a round
    """

    kind: str
    ids: bytes
    ignore_eos: bool


@dataclass(frozen=True)
class Setting:
    """One server with drafts.

    changes      of the settings
    concurrency  requests at a time; each begins when another one ends, or a moment after the one before it
    share        the part of the prompts that it runs, first and step
    measured     budgets come from a measured table of costs, not from COSTS
    """

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    concurrency: int = 8
    share: tuple[int, int] = (0, 4)
    measured: bool = False


def settings_list() -> list[Setting]:
    """Modes, batch mixes, chunk sizes, blocks, and caches that are too small for those who run."""
    mode, block = "speculative_verify_mode", "speculative_num_draft_tokens"
    chunk, tight = {"chunked_prefill_size": 64}, {"max_total_tokens": 2048}
    return [
        Setting("static", {mode: "static"}),
        Setting("cap-accept", {mode: "cap-accept"}, share=(1, 4)),
        Setting("compact", {}, share=(2, 4)),
        Setting("compact, measured costs", {}, share=(3, 4), measured=True),
        Setting("compact, one at a time", {}, concurrency=1, share=(0, 4)),
        Setting("compact, 32 at a time", {}, concurrency=32, share=(1, 4)),
        Setting("static, 32 at a time, chunks of 64", {mode: "static", **chunk}, 32, (2, 4)),
        Setting("compact, chunks of 64", chunk, share=(3, 4)),
        Setting("compact, small cache", tight, share=(0, 4)),
        Setting("static, small cache, chunks of 64", {mode: "static", **tight, **chunk}, share=(1, 4)),
        Setting("cap-accept, small cache, 32 at a time", {mode: "cap-accept", **tight}, 32, (2, 4)),
        Setting("compact, 3 drafted tokens", {block: 3}, share=(3, 4)),
        Setting("compact, 7 drafted tokens", {block: 7}, share=(0, 4)),
        Setting("static, 7 drafted tokens, small cache", {mode: "static", block: 7, **tight}, share=(1, 4)),
    ]


def read(served: Served, count: int) -> list[Case]:
    """As many prompts, of every kind in turns; the same ones in every run."""
    kinds = [_whole(served), _pieces(served), _tasks(served)]
    found: list[Case] = []
    for turn in itertools.cycle(kinds):
        if len(found) == count:
            return found
        found.append(next(turn))
    return found


def _whole(served: Served) -> Iterator[Case]:
    """The committed prompts, then the same ones cut."""
    for cut in itertools.cycle(CUTS):
        for one in drafting.read(served):
            ids = np.frombuffer(one.ids, np.int32)
            yield Case(one.kind, ids[: max(1, int(ids.size * cut))].tobytes(), ignore_eos=cut < 1.0)


def _pieces(served: Served) -> Iterator[Case]:
    """Pieces of held-out text from anywhere in it."""
    with lzma.open(HELDOUT, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    streams = [served.tokenizer.encode_plain(text) for text in texts]
    draw = np.random.default_rng(7)
    for length in itertools.cycle(PIECE_TOKENS):
        fitting = [stream for stream in streams if len(stream) >= length]
        stream = fitting[draw.integers(len(fitting))]
        start = int(draw.integers(len(stream) - length + 1))
        yield Case("text", np.array(stream[start : start + length], np.int32).tobytes(), ignore_eos=True)


def _tasks(served: Served) -> Iterator[Case]:
    """Held-out conversations; every second one goes on behind its end."""
    for seed in itertools.count():
        kind = list(KINDS)[seed % len(KINDS)]
        ids = prompt_ids(generate(kind, 10_000 + seed, "heldout"), served.encoding, served.tokenizer)
        if len(ids) <= LONGEST_TASK:
            yield Case(f"chat: {kind}", np.array(ids, np.int32).tobytes(), ignore_eos=seed % 2 == 1)
