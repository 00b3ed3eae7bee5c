"""`python -m engine generate`: prompts in, text out, by the same actors in one process, without HTTP."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson

from api.gate import AFTER_THINK, START, Wish, exact
from api.grammars import constrained
from api.handle import Engine
from api.served import Served, load_served
from engine.config import Settings
from engine.config_sources import add_arguments as add_settings
from engine.config_sources import printed, resolve
from engine.errors import BadRequest, ConfigError, EngineError
from engine.grammar.gate import GatePolicy, parse_request
from engine.grammar.gate.request import FORMATS
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
    form = parser.add_argument_group(
        "which form every output obeys: one of these"
    ).add_mutually_exclusive_group()
    form.add_argument(
        "--response-format",
        metavar="FILE",
        default="",
        help="JSON: a response_format as in the API, or a schema by itself; `json_object` is any object",
    )
    form.add_argument("--regex", metavar="PATTERN", help="a pattern that matches the whole output")
    form.add_argument("--ebnf", metavar="GRAMMAR", help="a grammar with the rule `root`")
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
        wish = wish_of(args, GatePolicy(whitespace=settings.whitespace))
    except EngineError as error:
        sayer("generate")(str(error))
        return REFUSED
    outputs = [("", "the engine ended")] * len(prompts)
    try:
        outputs = anyio.run(_generate, settings, entries, wish, backend_options={"use_uvloop": True})
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


def wish_of(args: argparse.Namespace, policy: GatePolicy) -> Wish | None:
    """The grammar that the flags ask for; None where they ask for none.

    raises  ConfigError for a file that can't be read or isn't JSON, GrammarRefused as `parse_request`
    """
    fields = {"regex": args.regex, "ebnf": args.ebnf} | _format_of(args.response_format)
    key = parse_request(fields, policy)
    root = AFTER_THINK if args.chat and args.thinking else START
    return None if key is None else Wish(key, root, next(name for name in fields if fields[name] is not None))


def _format_of(given: str) -> dict[str, Any]:
    """The request's field for a value of --response-format; schemas keep the spelling of their numbers."""
    if given in ("", "json_object"):
        return {"response_format": {"type": given} if given else None}
    try:
        text = Path(given).read_bytes()
        value = orjson.loads(text)
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"--response-format {given} can't be read: {error}") from error
    if isinstance(value, dict) and value.get("type") in FORMATS:
        return exact({"response_format": value}, b'{"response_format":%b}' % text)
    return {"json_schema": text}


async def _generate(settings: Settings, entries: Sequence[Entry], wish: Wish | None) -> list[tuple[str, str]]:
    """(text, failure) of each entry."""
    async with (
        local_engine(settings, grammars=wish is not None) as engine,
        constrained(engine.grammars, entries, [wish] * len(entries)) as whole,
    ):
        return await collect(engine, whole)
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
