"""`python -m engine bench nano`: what the shipped model can do, measured through the engine.

`json_match` is the share of short prompts from held-out schemas (at most 110 tokens) whose greedy answer,
written without a grammar, parses and equals the wanted JSON; `success` is the same for every kind of held-out
task. `heldout_nats_quantised` is the loss of the shipped weights on held-out text. Unrounded weights aren't
shipped: `heldout_nats` is what the training run recorded for them on the same sources.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from api.handle import Engine
from api.served import Served, load_served
from engine.config import Settings
from engine.errors import EngineError
from engine.local import local_engine, prepare_environment
from engine.messages import ABORTED, FAILED, Entry, Sampling
from training.tasks import KINDS, Example, check, generate, prompt_ids
from training.tokenizer import BOS, EOS

HELDOUT = Path(__file__).parent / "heldout.jsonl.xz"
ROW = 2048
SHORT_PROMPT = 110
LONG_PROMPT = 640
JSON_EXAMPLES = 256
OTHER_EXAMPLES = 48
QUICK_SHARE = 8
REPLY_TOKENS = 200
# Requests in flight: what the default cache holds without waiting.
GROUP = 32


class NotAnswered(EngineError):
    """The engine gave up on a request of the benchmark."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The figures named above, and how many examples and tokens they rest on."""
    settings = Settings(model_path=args.model_path)
    prepare_environment(settings)
    served = load_served(settings, 0)
    return anyio.run(_measure, settings, served, QUICK_SHARE if args.quick else 1)


async def _measure(settings: Settings, served: Served, share: int) -> dict[str, Any]:
    counts = {kind: (JSON_EXAMPLES if kind == "json" else OTHER_EXAMPLES) // share for kind in KINDS}
    rates: dict[str, float] = {}
    async with local_engine(settings) as engine:
        for kind, count in counts.items():
            rates[kind] = await success(engine, served, kind, count)
            print(f"{kind}: {rates[kind]:.3f} of {count}", flush=True)
        rows = list(heldout_rows(served))[::share]
        nats, tokens = await loss(engine, rows)
    figures: dict[str, Any] = {
        "json_match": rates["json"],
        "heldout_nats": recorded_nats(Path(settings.model_path)),
        "heldout_nats_quantised": round(nats, 4),
        "heldout_tokens": tokens,
        "success": rates,
        "examples": counts,
    }
    return figures


def examples_of(served: Served, kind: str, count: int) -> list[tuple[Example, list[int]]]:
    """The first `count` held-out examples with a short enough prompt, and the prompts' ids."""
    limit = SHORT_PROMPT if kind == "json" else LONG_PROMPT
    found: list[tuple[Example, list[int]]] = []
    seed = 0
    while len(found) < count:
        example = generate(kind, seed, "heldout")
        ids = prompt_ids(example, served.encoding, served.tokenizer)
        if len(ids) <= limit:
            found.append((example, ids))
        seed += 1
    return found


async def success(engine: Engine, served: Served, kind: str, count: int) -> float:
    """Share of examples that the greedy answer gets right. raises NotAnswered"""
    examples = examples_of(served, kind, count)
    right = 0
    for start in range(0, count, GROUP):
        group = examples[start : start + GROUP]
        texts = await answers(engine, [ids for _, ids in group])
        right += sum(check(example, text) for (example, _), text in zip(group, texts, strict=True))
    return round(right / count, 4)


async def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[str]:
    """Greedy answers with their special tokens, in order. raises NotAnswered"""
    sampling = Sampling(max_new_tokens=REPLY_TOKENS, temperature=0.0)
    group = await engine.submit([entry(ids, sampling) for ids in prompts])
    texts = [""] * len(prompts)
    while deltas := await group.take():
        for delta in deltas:
            if delta.finish in (ABORTED, FAILED):
                raise NotAnswered(delta.message)
            texts[group.index[delta.request_id]] += delta.text
    return texts


def entry(ids: list[int], sampling: Sampling) -> Entry:
    """A request that keeps special tokens in its text: tool calls are marked by them."""
    prompt = np.array(ids, np.int32).tobytes()
    return Entry(sink=0, prompt=prompt, sampling=sampling, skip_special_tokens=False)


def heldout_rows(served: Served) -> Iterator[list[int]]:
    """Rows of at most ROW + 1 ids of each source's documents, neighbours sharing one id, as in training."""
    streams: dict[str, list[int]] = {}
    bos, eos = served.tokenizer.token_id(BOS), served.tokenizer.token_id(EOS)
    with lzma.open(HELDOUT, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            stream = streams.setdefault(document["source"], [])
            stream += [bos, *served.tokenizer.encode_plain(document["text"]), eos]
    for stream in streams.values():
        for start in range(0, len(stream) - 1, ROW):
            yield stream[start : start + ROW + 1]


async def loss(engine: Engine, rows: Sequence[list[int]]) -> tuple[float, int]:
    """Mean nats of each token after a row's first, and how many there were. raises NotAnswered"""
    total, count = 0.0, 0
    sampling = Sampling(max_new_tokens=1, temperature=0.0, prompt_logprobs=0)
    for ids in rows:
        group = await engine.submit([entry(ids, sampling)])
        while deltas := await group.take():
            for delta in deltas:
                if delta.finish in (ABORTED, FAILED):
                    raise NotAnswered(delta.message)
                total -= sum(found.value for found in delta.prompt_logprobs)
                count += len(delta.prompt_logprobs)
        print(f"held-out: {total / count:.4f} nats over {count} tokens", flush=True)
    return total / count, count


def recorded_nats(model_path: Path) -> float:
    """Loss before rounding on the sources of HELDOUT, as recorded in training; NaN without a record."""
    file = model_path / "training.json"
    if not file.exists():
        return float("nan")
    record = json.loads(file.read_text())
    with lzma.open(HELDOUT, "rt", encoding="utf-8") as lines:
        sources = {json.loads(line)["source"] for line in lines}
    weights = {source: record["heldout_tokens"][source] - 1 for source in sources}
    total = sum(record["heldout_before"][source] * weight for source, weight in weights.items())
    return round(float(total / sum(weights.values())), 4)
