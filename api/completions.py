"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from api.checks import bad, check_group, ids_in_vocabulary, integer, new_tokens, sampling_of, stops_of
from api.completions_answer import CompletionAnswer, CompletionPlan
from api.exchange import Exchange
from api.intake import (
    Prompt,
    check_ends,
    check_features,
    check_stream_options,
    choose_rid,
    choose_route,
    count_of,
    entries_of,
    grammar_fields,
    params_of,
    tokenised,
)
from api.run import Service, run
from api.schema import CompletionBody, decode
from api.served import Served
from engine.messages import Entry, Sampling

DEFAULT_NEW_TOKENS = 16
"""OpenAI's default of this route."""


async def completions(service: Service, exchange: Exchange) -> None:
    """Answers one or several prompts; every refusal of the client's input comes before the first byte."""
    received_s = service.wall_s()
    raw = await exchange.body()
    body = decode(raw, CompletionBody)
    served = service.served
    rid = choose_rid(exchange, body.rid, lambda: service.fresh_id("cmpl-"))
    served.check_name(body.model)
    check_features(body, served)
    wish = await service.gate.wish(grammar_fields(body), raw=raw)
    check_ends(body, wish)
    count = count_of("n", body.n, served)
    prompts = await prompts_of("prompt", body.prompt, served, service.wall_s)
    check_group("prompt", len(prompts) * count, served.bounds)
    stop = stops_of("stop", body.stop)
    entries: list[Entry] = []
    for prompt in prompts:
        entries += entries_of(
            prompt,
            completion_sampling(body, service, prompt),
            count,
            rid=rid,
            stop=stop,
            keep_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            cache_salt=body.cache_salt or "",
            priority=integer("priority", body.priority, 0, -1000, 1000),
            timing=(received_s, prompt.began_s, prompt.done_s, service.wall_s()),
        )
    plan = plan_of(body, prompts, count, exchange.rid, int(received_s))
    route = choose_route(exchange, body)
    await run(
        service,
        exchange,
        entries,
        route,
        lambda _: CompletionAnswer(plan, served),
        bool(body.stream),
        [wish] * len(entries),
    )


def plan_of(
    body: CompletionBody, prompts: Sequence[Prompt], count: int, rid: str, created: int
) -> CompletionPlan:
    """How the answer is worded."""
    with_usage, continuous = check_stream_options(body)
    return CompletionPlan(
        rid=rid,
        created=created,
        prompts=tuple(prompt for prompt in prompts for _ in range(count)),
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        with_usage=with_usage,
        continuous=continuous,
        with_drafts=bool(body.return_speculation_stats),
    )


def completion_sampling(body: CompletionBody, service: Service, prompt: Prompt) -> Sampling:
    """Sampling of one prompt's completions."""
    bounds = service.served.bounds
    limit = new_tokens("max_tokens", body.max_tokens, DEFAULT_NEW_TOKENS, len(prompt.ids), bounds, "prompt")
    logprobs = integer("logprobs", body.logprobs, -1, 0, bounds.max_top_logprobs)
    return sampling_of(
        params_of(body),
        bounds,
        limit,
        service.draw_seed(),
        logprobs,
        logprobs if body.echo else -1,
    )


async def prompts_of(
    name: str,
    value: str | Sequence[str | int | list[int]],
    served: Served,
    wall_s: Callable[[], float],
) -> list[Prompt]:
    """One prompt, or each of a list, as ids in the vocabulary, with the times of its tokenisation."""
    if not value:
        raise bad(name, "the prompt is empty")
    if isinstance(value, str) or all(isinstance(item, int) for item in value):
        named: list[tuple[str, Any]] = [(name, value)]
    else:
        named = [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    prompts = []
    for at, item in named:
        began_s = wall_s()
        if isinstance(item, str):
            prompt = await text_prompt(at, item, served)
        elif isinstance(item, list):
            prompt = ids_prompt(at, item, served)
        else:
            raise bad(at, "a list holds texts, or token ids, or lists of token ids")
        prompts.append(replace(prompt, began_s=began_s, done_s=wall_s()))
    return prompts


async def text_prompt(name: str, text: str, served: Served) -> Prompt:
    """A text's ids. Special tokens written in it count as such: this route's prompts are raw."""
    if not text:
        raise bad(name, "the prompt is empty")
    ids = await tokenised(lambda: served.tokenizer.encode(text), len(text))
    ids_in_vocabulary(name, ids, served.bounds)
    return Prompt(ids, text)


def ids_prompt(name: str, ids: list[int], served: Served) -> Prompt:
    """A prompt that the client tokenised."""
    ids_in_vocabulary(name, ids, served.bounds)
    return Prompt(ids)
