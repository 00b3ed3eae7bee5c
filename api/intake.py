"""From checked bodies to the entries that ingress takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
import msgspec
import numpy as np

from api.checks import Params, bad, integer, rid_of, route_of
from api.exchange import Exchange
from api.gate import Wish
from api.schema import GenerateBody, SamplingParams, Wishes
from api.served import Served
from engine.features import STRUCTURED, feature_of, refuse_unsupported
from engine.messages import Entry, Sampling

LONG_TEXT = 20_000
"""Characters beyond which tokenising would hold up other requests on the loop by more than a few ms."""

GENERATE_NAMES = {
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    **{
        name: f"sampling_params.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "stop_token_ids",
        )
    },
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: ids and, where the client gave text, that text.

    began_s, done_s  wall-clock times of its tokenisation, 0 where nobody asked
    """

    ids: Sequence[int]
    text: str | None = None
    began_s: float = 0.0
    done_s: float = 0.0


def check_features(body: msgspec.Struct, served: Served) -> None:
    """Refuses every field that is set and that the server's modes don't support, by name."""
    wanted = []
    for name in body.__struct_fields__:
        value = getattr(body, name)
        feature = feature_of(name)
        if feature is not None and value and not harmless(name, value):
            wanted.append(feature)
    refuse_unsupported(wanted, served.modes)


def harmless(name: str, value: Any) -> bool:
    """A value that is set, but asks for nothing beyond the default."""
    if name == "response_format":
        return is_plain_text(value)
    if name in ("n", "best_of"):
        return bool(value == 1)
    if name == "modalities":
        return bool(value == ["text"])
    if name == "logprob_start_len":
        return bool(value < 0)
    return name == "tool_choice" and value in ("auto", "none")


def is_plain_text(response_format: Any) -> bool:
    """Whether it is {"type": "text"}. Raises BadRequest for another field beside that, unlike elsewhere."""
    if not isinstance(response_format, Mapping) or response_format.get("type") != "text":
        return False
    unknown = sorted(set(response_format) - {"type"})
    if unknown:
        raise bad(f"response_format.{unknown[0]}", "unknown field")
    return True


def grammar_fields(body: msgspec.Struct) -> dict[str, Any]:
    """The fields by which a grammar is asked for."""
    return {name: getattr(body, name) for name in STRUCTURED if name in body.__struct_fields__}


def check_ends(body: Wishes | SamplingParams, wish: Wish | None, prefix: str = "") -> None:
    """BadRequest where a constrained answer is told not to end: its grammar alone knows when it is whole."""
    least, name = (
        (body.min_tokens, "min_tokens")
        if isinstance(body, Wishes)
        else (body.min_new_tokens, "min_new_tokens")
    )
    if wish is not None and least:
        raise bad(prefix + name, f"does not go with {wish.param}: the answer ends where its form is complete")


def params_of(body: Wishes) -> Params:
    """Sampling fields of an OpenAI route."""
    return Params(
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        names={},
    )


def generate_params_of(params: SamplingParams) -> Params:
    """Sampling fields of /generate."""
    return Params(
        min_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.sampling_seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        names=GENERATE_NAMES,
    )


def check_stream_options(body: Wishes) -> tuple[bool, bool]:
    """(usage in a last chunk, usage in every chunk)."""
    options = body.stream_options
    if options is None:
        return False, False
    if not body.stream:
        raise bad("stream_options", "is only allowed when stream is true")
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def count_of(name: str, n: int | None, served: Served) -> int:
    """Completions a prompt."""
    return integer(name, n, 1, 1, served.bounds.max_n)


def choose_rid(exchange: Exchange, body_rid: str | None, fresh: Callable[[], str]) -> str:
    """The client's id, header before body, empty where it chose none; the answer's header has one anyway."""
    chosen = rid_of("x-request-id", exchange.header("x-request-id")) or rid_of("rid", body_rid)
    exchange.rid = chosen or fresh()
    return chosen


def choose_route(exchange: Exchange, body: Wishes | GenerateBody) -> int:
    """The demanded rank; -1 for none."""
    header = exchange.header("x-data-parallel-rank")
    wanted = body.routed_dp_rank
    return route_of(header, None if isinstance(wanted, list) else wanted, body.data_parallel_rank)


def choose_routes(exchange: Exchange, body: GenerateBody, count: int) -> list[int]:
    """The demanded rank of each of `count` prompts: a list in the body names each, -1 for none."""
    wanted = body.routed_dp_rank
    if not isinstance(wanted, list) or exchange.header("x-data-parallel-rank") is not None:
        return [choose_route(exchange, body)] * count
    if len(wanted) != count:
        raise bad("routed_dp_rank", f"a list must hold {count} ranks or nulls, one for each prompt")
    return [route_of(None, rank, None) for rank in wanted]


async def tokenised(work: Callable[[], list[int]], characters: int) -> list[int]:
    """The ids that `work` gives; off the loop where the text is long."""
    if characters <= LONG_TEXT:
        return work()
    return await anyio.to_thread.run_sync(work)


def entries_of(
    prompt: Prompt,
    sampling: Sampling,
    count: int,
    *,
    route: int = -1,
    rid: str,
    stop: tuple[str, ...],
    keep_stop: bool,
    skip_special_tokens: bool,
    cache_salt: str,
    priority: int,
    timing: tuple[float, float, float, float],
) -> list[Entry]:
    """`count` completions of one prompt, told apart by `child`.

    route  the rank that the client demands for this prompt alone, -1 for none
    """
    ids = np.asarray(prompt.ids, dtype=np.int32).tobytes()
    return [
        Entry(
            sink=0,
            prompt=ids,
            sampling=sampling,
            route=route,
            rid=rid,
            child=child,
            stop=stop,
            keep_stop=keep_stop,
            skip_special_tokens=skip_special_tokens,
            cache_salt=cache_salt,
            priority=priority,
            timing=timing,
        )
        for child in range(count)
    ]
