"""Reads answers as a client does, and says what is wrong with them."""

from __future__ import annotations

from typing import Any

import orjson

from engine.soak.http import Answer
from engine.soak.item import CHAT, GENERATE, Choice, Item, Reply

FINISHES = {"stop", "length", "tool_calls"}
DONE = b"[DONE]"
SHOWN = 300
"""Characters of an answer that a fault quotes."""


class Malformed(Exception):
    """An answer that isn't what its route promises."""


def faults_of(item: Item, answer: Answer) -> tuple[Reply | None, list[str]]:
    """(the answer where it is a whole 200, what is wrong with it)."""
    if not answer.complete:
        return None, ["the connection ended before the answer"]
    if answer.status not in item.statuses:
        wanted = " or ".join(map(str, sorted(item.statuses)))
        return None, [f"status {answer.status}, not {wanted}: {shown(answer)}"]
    try:
        if answer.status != 200:
            check_refusal(answer)
            return None, []
        reply = streamed(item, answer) if item.streamed else whole(item, answer.json())
        return reply, reply_faults(item, reply) + (item.check(reply) if item.check else [])
    except (Malformed, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        return None, [f"malformed ({type(error).__name__}: {error}): {shown(answer)}"]


def shown(answer: Answer) -> str:
    """The beginning of a body."""
    return bytes(answer.body[:SHOWN]).decode(errors="replace")


def check_refusal(answer: Answer) -> None:
    """An error object, and a hint when to come again where there is one to give. raises Malformed"""
    error = answer.json()["error"]
    if not isinstance(error["message"], str) or not error["message"] or not isinstance(error["type"], str):
        raise Malformed("an error without message and type")
    if answer.status in (408, 429, 503) and "retry-after" not in answer.headers:
        raise Malformed(f"{answer.status} without Retry-After")


def reply_faults(item: Item, reply: Reply) -> list[str]:
    """What every whole answer must have."""
    faults = []
    if len(reply.choices) != item.completions:
        faults.append(f"{len(reply.choices)} completions, not {item.completions}")
    faults += [f"finish_reason {one.finish!r}" for one in reply.choices if one.finish not in FINISHES]
    if not 0 < reply.completion_tokens <= item.limit * item.completions or reply.prompt_tokens < 1:
        faults.append(
            f"usage of {reply.prompt_tokens} + {reply.completion_tokens} tokens, at most {item.limit} for "
            f"each of {item.completions} completions were asked for"
        )
    if -1 not in (item.demanded, reply.rank) and item.demanded != reply.rank:
        faults.append(f"rank {reply.rank} answered, {item.demanded} was demanded")
    scored = [one.scored for one in reply.choices]
    # The token that ends a completion is counted, but is no text.
    if scored and -1 not in scored and not 0 <= reply.completion_tokens - sum(scored) <= len(scored):
        faults.append(f"{sum(scored)} tokens with log probabilities of {reply.completion_tokens}")
    return faults


def whole(item: Item, body: Any) -> Reply:
    """A reply from an answer in one piece. raises Malformed and what a wrong shape raises"""
    if item.path == GENERATE:
        return generated(body if isinstance(body, list) else [body])
    choices = body["choices"]
    if [one["index"] for one in choices] != list(range(len(choices))):
        raise Malformed("choices are not numbered")
    made = [chat_choice(one) if item.path == CHAT else completion_choice(one) for one in choices]
    return with_usage(tuple(made), body["usage"])


def chat_choice(choice: dict[str, Any]) -> Choice:
    """One of a chat's choices."""
    message = choice["message"]
    if message["role"] != "assistant":
        raise Malformed(f"role {message['role']!r}")
    calls = tuple(
        (one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())
    )
    scores = choice["logprobs"]
    return Choice(
        message["content"] or "",
        choice["finish_reason"],
        calls,
        -1 if scores is None else len(scores["content"]),
    )


def completion_choice(choice: dict[str, Any]) -> Choice:
    """One of a completion's choices."""
    scores = choice["logprobs"]
    return Choice(
        choice["text"], choice["finish_reason"], (), -1 if scores is None else len(scores["token_logprobs"])
    )


def generated(items: list[dict[str, Any]]) -> Reply:
    """A native answer; its prompts are counted for each completion."""
    choices, prompts, tokens = [], 0, 0
    for one in items:
        meta = one["meta_info"]
        if len(one["output_ids"]) != meta["completion_tokens"]:
            raise Malformed(f"{len(one['output_ids'])} ids, {meta['completion_tokens']} completion_tokens")
        choices.append(Choice(one["text"], meta["finish_reason"]["type"]))
        prompts += meta["prompt_tokens"]
        tokens += meta["completion_tokens"]
    ranks = {one["meta_info"]["dp_rank"] for one in items}
    return Reply(tuple(choices), prompts, tokens, rank=ranks.pop() if len(ranks) == 1 else -1)


def with_usage(choices: tuple[Choice, ...], usage: dict[str, Any]) -> Reply:
    """A reply with what its usage says. raises Malformed where it doesn't add up"""
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    if prompt + completion != usage["total_tokens"]:
        raise Malformed(f"{prompt} + {completion} tokens are not {usage['total_tokens']}")
    return Reply(choices, prompt, completion)


def streamed(item: Item, answer: Answer) -> Reply:
    """A reply from an event stream. raises Malformed and what a wrong shape raises"""
    events = [line[6:] for line in bytes(answer.body).split(b"\n") if line.startswith(b"data: ")]
    if events.count(DONE) != 1 or events[-1] != DONE:
        raise Malformed(f"[DONE] came {events.count(DONE)} times, or not last")
    chunks = [orjson.loads(event) for event in events[:-1]]
    for chunk in chunks:
        if "error" in chunk:
            raise Malformed(f"an error in a stream: {chunk['error']}")
    if item.path == GENERATE:
        return generated([last_of(chunks, index) for index in range(item.completions)])
    parts = [Parts() for _ in range(item.completions)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            parts[choice["index"]].add(choice, item.path == CHAT)
    if chunks[-1]["choices"] or not chunks[-1]["usage"]:
        raise Malformed("the last chunk isn't the usage that was asked for")
    return with_usage(tuple(one.choice() for one in parts), chunks[-1]["usage"])


def last_of(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The newest event of a completion; native streams carry everything so far."""
    mine = [chunk for chunk in chunks if chunk.get("index", 0) == index]
    if not mine or not mine[-1]["meta_info"]["finish_reason"]:
        raise Malformed(f"completion {index} has no end")
    return mine[-1]


class Parts:
    """A choice as its chunks come."""

    def __init__(self) -> None:
        self.text, self.roles = "", 0
        self.finishes: list[str] = []
        self.calls: list[list[str]] = []
        self.scored = -1

    def add(self, choice: dict[str, Any], chat: bool) -> None:
        """One chunk's. raises Malformed"""
        if self.finishes:
            raise Malformed("a chunk came after its choice's end")
        if choice["finish_reason"] is not None:
            self.finishes.append(choice["finish_reason"])
        if choice["logprobs"] is not None:
            column = choice["logprobs"]["content" if chat else "token_logprobs"]
            self.scored = max(self.scored, 0) + len(column)
        if not chat:
            self.text += choice["text"]
            return
        delta = choice["delta"]
        self.roles += "role" in delta
        if not self.roles:
            raise Malformed("content came before the role")
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(self.calls):
                self.calls.append([call["function"]["name"], ""])
            self.calls[call["index"]][1] += call["function"]["arguments"]

    def choice(self) -> Choice:
        """The whole. raises Malformed where there is no end"""
        if len(self.finishes) != 1:
            raise Malformed("a choice without finish_reason")
        calls = tuple((name, arguments) for name, arguments in self.calls)
        return Choice(self.text, self.finishes[0], calls, self.scored)
