"""`python -m engine bench offline --against transformers`: the same tokens from the same weights, faster.

The engine takes all prompts as one group over its actors; the peer takes them in eager batches of equal,
unpadded length (padding would be wrong for this architecture) with its best number of threads. Both run in
float32 and must give the same tokens, or the benchmark fails. Pairs are interleaved; a ratio is the median of
nine. The cases `decode_1`, `decode_8` and `prefill` are those of `bench serve`.

With `--device cuda` both run on one device in bfloat16, the engine as it is served there. Its kernels round
activations and caches to FP8, as the model's authors do; the peer doesn't, so texts part at near ties: it is
told how many tokens they share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import anyio
import numpy as np

from api.handle import Engine
from api.served import Served, load_served
from bench import drafting
from bench.drafting import common
from bench.peer import Batch, Peer
from engine.config import Settings
from engine.errors import EngineError
from engine.local import local_engine, prepare_environment
from engine.messages import LENGTH, Entry, Sampling

LENGTHS = (32, 96, 192, 384)
PROMPTS = 8
NEW_TOKENS = 64
PAIRS = 9
TEXT = (
    "The scheduler keeps a queue of requests and a pool of pages. A request waits until its pages fit, then "
    "its prompt is read in chunks while other requests go on. Every page has one owner, and is given back "
    "when its last reader has gone. The table below lists the fields of a record with their types and units. "
)


class Differs(EngineError):
    """The engine and the peer gave different tokens."""


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures; with `--against transformers` also the ratios; `--speculative`: of bench/drafting.py."""
    if args.speculative:
        return drafting.run(args)
    cuda = args.device == "cuda"
    settings = Settings(
        model_path=args.model_path, device=args.device, dtype="bfloat16" if cuda else "float32"
    )
    prepare_environment(settings)
    served, peer = load_served(settings, 0), None
    if args.against == "transformers" and cuda:
        peer = Peer(settings.model_path, 1, settings.device, settings.dtype)
        # What it loads or chooses at first use isn't measured.
        peer.run(prompts(served), 4)
    elif args.against == "transformers":
        peer = best_peer(settings.model_path, prompts(served))
    try:
        return anyio.run(_measure, settings, served, peer, 3 if args.quick else PAIRS)
    finally:
        if peer is not None:
            peer.close()


def prompts(served: Served) -> list[Batch]:
    """One batch for each length; every prompt starts elsewhere in the text."""
    ids = served.tokenizer.encode_plain(TEXT * 12)
    return [[ids[7 * i : 7 * i + length] for i in range(PROMPTS)] for length in LENGTHS]


def best_peer(model_path: str, batches: Sequence[Batch]) -> Peer:
    """The peer with the number of threads that is faster on one batch."""
    peers = {count: Peer(model_path, count) for count in sorted({1, os.cpu_count() or 1})}
    taken_s = {}
    for count, peer in peers.items():
        peer.run(batches[1:2], 4)
        taken_s[count] = peer.run(batches[1:2], 16)[0]
    best = min(taken_s, key=lambda count: taken_s[count])
    for count, peer in peers.items():
        if count != best:
            peer.close()
    print(
        "peer's threads:", best, {count: round(seconds, 2) for count, seconds in taken_s.items()}, flush=True
    )
    return peers[best]


async def _measure(settings: Settings, served: Served, peer: Peer | None, pairs: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    async with local_engine(settings) as engine:
        batches = prompts(served)
        for name, count, new in (("decode_1", 1, NEW_TOKENS), ("decode_8", 8, NEW_TOKENS)):
            figures[f"{name}_tokens_per_s"] = await decode_rate(engine, batches[1][:count], new)
        figures["prefill_tokens_per_s"] = await prefill_rate(engine, served)
        if peer is not None:
            # As the peer's: what is chosen or compiled at first use isn't measured.
            await timed(engine, batches, 4)
            figures |= await compare(engine, peer, batches, pairs, same=settings.device == "cpu")
    return figures


async def decode_rate(engine: Engine, batch: Batch, new_tokens: int) -> float:
    """Output tokens a second of decode steps alone: what more tokens cost over one; the best of three."""
    best = 0.0
    for _ in range(3):
        first, _ = await timed(engine, [batch], 1)
        whole, _ = await timed(engine, [batch], new_tokens)
        best = max(best, len(batch) * (new_tokens - 1) / (whole - first))
    return round(best, 1)


async def prefill_rate(engine: Engine, served: Served) -> float:
    """Prompt tokens a second of a prompt of 512 tokens with one output token; the best of three."""
    ids = served.tokenizer.encode_plain(TEXT * 12)
    times = [(await timed(engine, [[ids[i : i + 512]]], 1))[0] for i in range(3)]
    return round(512 / min(times), 1)


async def compare(
    engine: Engine, peer: Peer, batches: Sequence[Batch], pairs: int, same: bool
) -> dict[str, Any]:
    """Ratios of the peer's time over the engine's. raises Differs where tokens must be the same."""
    whole, first, rest, shared = [], [], [], 1.0
    for pair in range(pairs):
        own_s, own = await timed(engine, batches, NEW_TOKENS)
        peer_s, theirs = await anyio.to_thread.run_sync(peer.run, batches, NEW_TOKENS)
        if same:
            check_same(own, theirs)
        shared = min(shared, shared_tokens(own, theirs))
        own_first, _ = await timed(engine, batches, 1)
        peer_first, _ = await anyio.to_thread.run_sync(peer.run, batches, 1)
        whole.append(peer_s / own_s)
        first.append(peer_first / own_first)
        rest.append((peer_s - peer_first) / (own_s - own_first))
        print(
            f"pair {pair + 1} of {pairs}: {whole[-1]:.2f} (engine {own_s:.2f} s, peer {peer_s:.2f} s)",
            flush=True,
        )
    low, middle, high = statistics.quantiles(whole, n=4)
    return {
        "ratio": round(middle, 2),
        "ratio_low": round(low, 2),
        "ratio_high": round(high, 2),
        "prefill_ratio": round(statistics.median(first), 2),
        "decode_ratio": round(statistics.median(rest), 2),
        "pairs": pairs,
        "same_tokens": shared == 1.0,
        "shared_tokens": round(shared, 4),
    }


def check_same(own: list[list[int]], theirs: list[list[int]]) -> None:
    """raises Differs at the first difference."""
    for prompt, (mine, other) in enumerate(zip(own, theirs, strict=True)):
        if mine != other:
            at = common(mine, other)
            raise Differs(f"prompt {prompt}: token {at} is {mine[at]} here and {other[at]} in the peer")


def shared_tokens(own: list[list[int]], theirs: list[list[int]]) -> float:
    """Of all tokens the share before each prompt's first difference."""
    return sum(map(common, own, theirs)) / sum(map(len, own))


async def timed(engine: Engine, batches: Sequence[Batch], new_tokens: int) -> tuple[float, list[list[int]]]:
    """(seconds, new tokens of each prompt), all prompts as one group."""
    sampling = Sampling(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    entries = [
        Entry(sink=0, prompt=np.array(prompt, np.int32).tobytes(), sampling=sampling)
        for batch in batches
        for prompt in batch
    ]
    begin = time.perf_counter()
    group = await engine.submit(entries)
    tokens: list[list[int]] = [[] for _ in entries]
    while deltas := await group.take():
        for delta in deltas:
            tokens[group.index[delta.request_id]] += delta.token_ids
            if delta.finish and delta.finish != LENGTH:
                raise EngineError(f"a request ended with {delta.finish}: {delta.message}")
    return time.perf_counter() - begin, tokens
