"""Requests that must be refused, each with its status."""

from __future__ import annotations

from typing import Any

from engine.soak.item import CHAT, COMPLETIONS, GENERATE, Item

HUGE = str(1 << 34)
"""A length that no server takes; none of it is sent."""

SAY = [{"role": "user", "content": "hi"}]


def completion(status: int, headers: tuple[tuple[str, str], ...] = (), **fields: Any) -> Item:
    """A completion that is refused for these fields."""
    return refused(status, COMPLETIONS, {"prompt": "hi", "max_tokens": 2, **fields}, headers)


def talk(status: int, **fields: Any) -> Item:
    """A chat that is refused for these fields."""
    return refused(status, CHAT, {"messages": SAY, "max_tokens": 2, **fields})


def refused(
    status: int,
    path: str,
    body: dict[str, Any] | bytes,
    headers: tuple[tuple[str, str], ...] = (),
    method: str = "POST",
) -> Item:
    """A request and the status that it must get."""
    return Item(
        kind="bad", path=path, body=body, method=method, headers=headers, statuses=frozenset({status})
    )


def cases(vocabulary: int, context: int, ranks: int) -> list[Item]:
    """All of them. vocabulary: an id that is out of it; context: longest prompt plus output in tokens."""
    return [*_bodies(vocabulary, context), *_completions(context, ranks), *_talks()]


def _bodies(vocabulary: int, context: int) -> list[Item]:
    """Wrong paths, methods and bodies."""
    return [
        refused(400, COMPLETIONS, b"{not json"),
        refused(400, CHAT, b""),
        refused(400, CHAT, b'{"messages": "hi"}'),
        refused(400, GENERATE, b'{"text": "\xff\xfe"}'),
        refused(400, COMPLETIONS, b'{"prompt": "hi", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        refused(413, COMPLETIONS, b"", (("content-length", HUGE),)),
        refused(404, "/v1/nothing", {}),
        refused(405, COMPLETIONS, b"", method="GET"),
        refused(405, "/v1/models", {}),
        refused(400, COMPLETIONS, {"prompt": ""}),
        refused(400, COMPLETIONS, {"prompt": [vocabulary], "max_tokens": 2}),
        refused(400, COMPLETIONS, {"prompt": [5] * (context + 1), "max_tokens": 2}),
        refused(400, GENERATE, {"sampling_params": {"max_new_tokens": 2}}),
        refused(400, GENERATE, {"text": "hi", "input_ids": [5], "sampling_params": {"max_new_tokens": 2}}),
        refused(400, GENERATE, {"text": "hi", "sampling_params": {"top_k": -5}}),
    ]


def _completions(context: int, ranks: int) -> list[Item]:
    """Wrong fields of completions."""
    return [
        completion(404, model="no-such-model"),
        completion(400, temperature="hot"),
        completion(400, temperature=3.0),
        completion(400, top_p=0),
        completion(400, n=0),
        completion(400, n=1000),
        completion(400, max_tokens=0),
        completion(400, max_tokens=-3),
        completion(400, max_tokens=context + 1),
        completion(400, logprobs=1000),
        completion(400, logit_bias={"x": 1}),
        completion(400, stop=[""]),
        completion(400, stop=["x"] * 17),
        completion(400, stop_regex="x"),
        refused(400, COMPLETIONS, b'{"prompt": "hi", "seed": 99999999999999999999999}'),
        completion(400, rid="x" * 200),
        completion(400, repetition_penalty=0),
        completion(400, stream_options={"include_usage": True}),
        completion(400, routed_dp_rank=ranks),
        completion(400, (("x-data-parallel-rank", str(ranks)),)),
        completion(400, (("x-data-parallel-rank", "first"),)),
        completion(400, regex="("),
        completion(400, regex="a", json_schema="{}"),
    ]


def _talks() -> list[Item]:
    """Wrong fields of chats."""
    return [
        talk(400, messages=[]),
        talk(400, messages=[{"role": "nobody", "content": "hi"}]),
        talk(400, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        talk(400, top_logprobs=2),
        talk(400, functions=[{"name": "f"}]),
        talk(400, response_format={"type": "poem"}),
        talk(400, thinking={"type": "perhaps"}),
        talk(400, tool_choice="required"),
        talk(404, model="no-such-model"),
    ]
