"""What a server can do, found out by asking it once, and the answers that must never change."""

from __future__ import annotations

import random
from dataclasses import replace

import anyio

from engine.errors import ConfigError
from engine.soak.http import Answer
from engine.soak.item import CHAT, COMPLETIONS, Item
from engine.soak.plan import FORMS, WORDS
from engine.soak.structured import Forms
from engine.soak.traffic import Traffic

MARGIN = 0.05
"""Least distance of the two best log probabilities at each token of a canary, more than rounding turns."""

CANDIDATES, CANARIES, FEWEST, TOKENS = 40, 12, 3, 6
UNSUPPORTED = "unsupported_feature"


async def left_out(traffic: Traffic, kinds: list[str], forms: Forms | None) -> dict[str, str]:
    """Kinds that the server says it doesn't support, with its words. Other faults are violations later."""
    found = {}
    makers = {} if forms is None else {
        "json_schema": forms.schema, "regex": forms.regex, "guided_choice": forms.choice,
        "tool_forced": forms.call,
    }  # fmt: skip
    for kind in [kind for kind in FORMS if kind in kinds]:
        item = makers[kind](random.Random(0), "Say it.")
        probe = replace(item, kind="probe", statuses=frozenset({200, 400, 500}), check=None)
        answer, _ = await traffic.send(probe)
        if answer.status == 400 and code_of(answer) == UNSUPPORTED:
            found[kind] = answer.json()["error"]["message"]
    return found


def code_of(answer: Answer) -> str:
    """The error's code."""
    return str(answer.json().get("error", {}).get("code"))


async def canaries(traffic: Traffic, seed: int) -> list[Item]:
    """Greedy requests with answers that rounding can't change, each answered once.

    raises  ConfigError where the model is sure of too few answers
    """
    draw = random.Random(seed)
    chosen: list[Item] = []
    for number in range(CANDIDATES):
        words = " ".join(draw.choices(WORDS, k=draw.randint(2, 12)))
        chat = number % 3 == 0
        more = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        say = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        path, body = (CHAT if chat else COMPLETIONS), {**say, "max_tokens": TOKENS, "temperature": 0}
        item = Item(kind="canary", path=path, body=body, limit=TOKENS)
        answer, reply = await traffic.send(replace(item, kind="probe", body={**body, **more}))
        if reply is None:
            continue
        if margin_of(answer, chat) >= MARGIN:
            same = f"canary {number}"
            traffic.known[same] = [one.text for one in reply.choices]
            chosen.append(replace(item, same=same))
        if len(chosen) == CANARIES:
            break
        await anyio.sleep(0)
    if len(chosen) < FEWEST:
        raise ConfigError(
            f"{len(chosen)} of {CANDIDATES} greedy answers are certain enough, {FEWEST} are needed"
        )
    return chosen


def margin_of(answer: Answer, chat: bool) -> float:
    """The least distance of the two best tokens over an answer."""
    scores = answer.json()["choices"][0]["logprobs"]
    if chat:
        rows = [[one["logprob"] for one in entry["top_logprobs"]] for entry in scores["content"]]
    else:
        rows = [list(row.values()) for row in scores["top_logprobs"]]
    best = [sorted(row, reverse=True)[:2] for row in rows]
    return min((two[0] - two[1] if len(two) == 2 else 0.0 for two in best), default=0.0)
