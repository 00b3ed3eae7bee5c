"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from api.chat_answer import ChatAnswer, ChatPlan
from api.checks import bad, check_group, integer, new_tokens, sampling_of, stops_of
from api.exchange import Exchange
from api.gate import AFTER_THINK, START, Wish
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
from api.schema import ChatBody, decode
from api.served import Served
from api.tool_choice import FREE, Forced, forced_of
from engine.errors import BadRequest, EngineError
from engine.messages import Sampling
from engine.model.segments import Segment

EFFORTS = {"none": None, "minimal": "low", "medium": "high", "xhigh": "max"}
"""OpenAI's words for efforts that a checkpoint's table may lack, and the nearest that DeepSeek-V4 has."""

MAX_CALLS = 128
"""Most calls of one completion; a model that writes more of them is in a loop."""


async def chat(service: Service, exchange: Exchange) -> None:
    """Answers one chat; every refusal of the client's input comes before the first byte."""
    received_s = service.wall_s()
    raw = await exchange.body()
    body = decode(raw, ChatBody)
    served = service.served
    rid = choose_rid(exchange, body.rid, lambda: service.fresh_id("chatcmpl-"))
    served.check_name(body.model)
    check_features(body, served)
    forced = forced_of(body.tool_choice, body.tools or [])
    plan = plan_of(body, served, exchange.rid, int(received_s), forced)
    check_group("n", plan.count, served.bounds)
    began_s = service.wall_s()
    prompt = await prompt_of(body, served, plan)
    done_s = service.wall_s()
    wish = await wish_of(body, service, forced, raw)
    entries = entries_of(
        prompt,
        chat_sampling(body, service, prompt),
        plan.count,
        rid=rid,
        stop=stops_of("stop", body.stop),
        keep_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        cache_salt=body.cache_salt or "",
        priority=integer("priority", body.priority, 0, -1000, 1000),
        timing=(received_s, began_s, done_s, done_s),
    )
    tokens = len(prompt.ids)
    route = choose_route(exchange, body)
    await run(
        service,
        exchange,
        entries,
        route,
        lambda _: ChatAnswer(plan, tokens, served),
        bool(body.stream),
        [wish] * len(entries),
    )


async def wish_of(body: ChatBody, service: Service, forced: Forced, raw: bytes) -> Wish | None:
    """The grammar of the answer, which begins behind the reasoning where there is one; None for free text.

    raises  GrammarRefused; BadRequest where tools are shown, too: no grammar says both
    """
    root = AFTER_THINK if thinking_of(body) else START
    calls = None
    if body.tools and calls_of(body):
        parallel = body.parallel_tool_calls is not False
        calls = await service.gate.calls(body.tools, forced, parallel, root, raw)
    wish = await service.gate.wish(grammar_fields(body), root=root, raw=raw)
    if wish is not None and calls_of(body):
        raise bad("tool_choice", f"must be none beside {wish.param}: an answer that has its form is no call")
    check_ends(body, wish or calls)
    return wish or calls


def plan_of(body: ChatBody, served: Served, rid: str, created: int, forced: Forced = FREE) -> ChatPlan:
    """How the answer is worded."""
    with_usage, continuous = check_stream_options(body)
    return ChatPlan(
        rid=rid,
        created=created,
        count=count_of("n", body.n, served),
        thinking=thinking_of(body),
        separate=body.separate_reasoning is not False,
        calls=calls_of(body),
        named=bool(forced.name),
        logprobs=bool(body.logprobs),
        with_usage=with_usage,
        continuous=continuous,
        with_drafts=bool(body.return_speculation_stats),
    )


async def prompt_of(body: ChatBody, served: Served, plan: ChatPlan) -> Prompt:
    """The rendered messages as ids."""
    segments = rendered(body, served, body.tools if plan.calls else None, plan.thinking)
    length = sum(len(text) for text, _ in segments)
    return Prompt(await tokenised(lambda: served.tokenizer.encode_segments(segments), length))


def chat_sampling(body: ChatBody, service: Service, prompt: Prompt) -> Sampling:
    """Sampling of every completion."""
    bounds = service.served.bounds
    name, wanted = limit_of(body)
    limit = new_tokens(name, wanted, bounds.context_length, len(prompt.ids), bounds, "messages")
    return sampling_of(params_of(body), bounds, limit, service.draw_seed(), logprobs_of(body, service.served))


def calls_of(body: ChatBody) -> int:
    """Most calls of one completion; 0 where the model is shown no tools."""
    if not body.tools or body.tool_choice == "none":
        return 0
    return 1 if body.parallel_tool_calls is False else MAX_CALLS


def thinking_of(body: ChatBody) -> bool:
    """Whether the model is asked to reason first; off unless the client asks.

    Clients say so in the template's arguments, or as DeepSeek's own service has it: {"type": "enabled"}.
    """
    options = body.chat_template_kwargs or {}
    value = options.get("thinking", options.get("enable_thinking"))
    if value is None and body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise bad("thinking.type", f"must be enabled or disabled, not {kind!r}")
        return bool(kind == "enabled")
    if value is not None and not isinstance(value, bool):
        raise bad("chat_template_kwargs.thinking", f"must be true or false, not {value!r}")
    return bool(value)


def rendered(
    body: ChatBody, served: Served, tools: list[dict[str, Any]] | None, thinking: bool
) -> list[Segment]:
    """The prompt's segments. Whatever goes wrong in rendering is the client's fault."""
    effort = body.reasoning_effort
    if effort is not None and effort not in served.encoding.strings.efforts and effort in EFFORTS:
        effort = EFFORTS[effort]
    try:
        return served.encoding.segments(
            body.messages,
            thinking=thinking,
            reasoning_effort=effort,
            tools=tools,
            response_format=shown_format(body.response_format),
        )
    except EngineError:
        raise
    except Exception as error:
        raise BadRequest(f"messages: can't be rendered: {error}", param="messages") from error


def shown_format(response_format: Any) -> Any:
    """What the model is told of the answer's form, as the chat format has it: a JSON schema, or nothing."""
    if not isinstance(response_format, dict):
        return None
    inner = response_format.get("json_schema")
    has_schema = isinstance(inner, dict) and isinstance(inner.get("schema"), dict)
    kind = response_format.get("type")
    return response_format if kind == "json_object" or (kind == "json_schema" and has_schema) else None


def limit_of(body: ChatBody) -> tuple[str, int | None]:
    """(field, value) of the output limit; the newer name wins."""
    if body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def logprobs_of(body: ChatBody, served: Served) -> int:
    """-1 for none, else the number of best tokens beside the chosen one."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    if not body.logprobs:
        return -1
    return integer("top_logprobs", body.top_logprobs, 0, 0, served.bounds.max_top_logprobs)
