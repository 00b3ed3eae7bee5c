"""`python -m engine generate`: prompts in, text out, by the same actors in one process, without HTTP."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import anyio
import numpy as np

from api.handle import Engine
from api.served import Served, load_served
from engine.config import Settings
from engine.config_sources import add_arguments as add_settings
from engine.config_sources import printed, resolve
from engine.errors import BadRequest, ConfigError, EngineError
from engine.lifecycle_box import leaves
from engine.local import local_engine, prepare_environment
from engine.messages import ABORTED, FAILED, Entry, Sampling
from engine.rank_process import sayer

DONE, FAILED_CODE, REFUSED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts and sampling, then the flags of `serve`."""
    own = parser.add_argument_group("what to generate")
    own.add_argument(
        "--prompt", action="append", default=[], help="a prompt; may be repeated. None: lines of stdin"
    )
    own.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    own.add_argument("--thinking", action="store_true", help="with --chat: let the model reason first")
    own.add_argument("--max-new-tokens", type=int, default=64, help="longest output in tokens (default 64)")
    own.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely token (default)")
    own.add_argument("--top-p", type=float, default=1.0, help="nucleus of sampled tokens (default 1.0)")
    own.add_argument("--seed", type=int, default=0, help="seed of sampling (default 0)")
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """Prints one output a prompt, in their order; returns the exit code."""
    try:
        settings, sources = resolve(args)
        if args.print_config:
            print(printed(settings, sources), end="")
            return DONE
        prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
        if settings.dp_size != 1:
            raise ConfigError(f"--dp-size is {settings.dp_size}, but generate runs one rank; use serve")
        prepare_environment(settings)
        served = load_served(settings, int(time.time()))
        entries = [_entry(served, prompt, args) for prompt in prompts]
    except EngineError as error:
        sayer("generate")(str(error))
        return REFUSED
    outputs = [("", "the engine ended")] * len(prompts)
    try:
        outputs = anyio.run(_generate, settings, entries, backend_options={"use_uvloop": True})
    except* EngineError as group:
        sayer("generate")("; ".join(str(error) for error in leaves(group)))
    for prompt, (text, failure) in zip(prompts, outputs, strict=True):
        print(f"{prompt}\n  failed: {failure}" if failure else f"{prompt}\n  -> {text}")
    return FAILED_CODE if any(failure for _, failure in outputs) else DONE


def _entry(served: Served, prompt: str, args: argparse.Namespace) -> Entry:
    """The request for one prompt. raises BadRequest."""
    if args.chat:
        segments = served.encoding.segments([{"role": "user", "content": prompt}], thinking=args.thinking)
        ids = served.tokenizer.encode_segments(segments)
    else:
        ids = served.tokenizer.encode_plain(prompt)
    if not 0 < len(ids) < served.bounds.context_length:
        raise BadRequest(
            f"prompt of {len(ids)} tokens: 1 to {served.bounds.context_length - 1} fit", "prompt"
        )
    sampling = Sampling(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
    )
    return Entry(sink=0, prompt=np.array(ids, np.int32).tobytes(), sampling=sampling)


async def _generate(settings: Settings, entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(text, failure) of each entry."""
    async with local_engine(settings) as engine:
        return await collect(engine, entries)
    return []


async def collect(engine: Engine, entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(text, failure) of each entry, submitted as one group. raises as `Engine.submit`."""
    if not entries:
        return []
    group = await engine.submit(entries)
    texts, failures = [""] * len(entries), [""] * len(entries)
    while deltas := await group.take():
        for delta in deltas:
            place = group.index[delta.request_id]
            texts[place] += delta.text
            if delta.finish in (ABORTED, FAILED):
                failures[place] = delta.message or "aborted"
    return list(zip(texts, failures, strict=True))
