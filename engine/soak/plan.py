"""The seeded plan of the traffic: which request comes next."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.soak import bad
from engine.soak.item import CHAT, COMPLETIONS, GENERATE, Item
from engine.soak.structured import Forms, tools

WEIGHTS = {
    "chat": 16, "completion": 20, "generate": 10, "canary": 10, "cancel": 8, "bad": 8, "stop": 4, "seeded": 4,
    "logprobs": 4, "many": 3, "batch": 2, "long": 1, "scored": 1, "json_schema": 4, "regex": 3,
    "guided_choice": 3, "tool_auto": 1, "tool_forced": 1,
}  # fmt: skip
"""Kinds of requests, and how often each comes."""

FORMS = ("json_schema", "regex", "guided_choice", "tool_forced")
"""Kinds that need structured output."""

WORDS = re.findall(
    r"\w+",
    "Once upon a time there was a small house near the river where an old man told the children about rain "
    "light stone bread winter horses music numbers seven twelve red green north",
)

ROUTED, STREAMED, LEAVE_S = 0.4, 0.4, 0.6
"""Shares of requests that name a rank and that stream; the latest moment at which a client leaves."""


BURST_TOKENS = 8
"""Long enough that all of a burst is there before the first of it has gone."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the plan knows of the server, and how long its prompts may be. Sizes in tokens.

    long, scored  of prompts that need several chunks, and of those whose own tokens get log probabilities
    """

    ranks: int
    context: int
    vocabulary: int
    drafts: bool = False
    long: int = 1200
    scored: int = 64


class Plan:
    """Draws requests; equal seeds draw the same ones in the same order.

    size  scales the lengths of outputs; the pace sets it
    """

    def __init__(
        self, seed: int, served: Served, kinds: Sequence[str], draw: type[random.Random] = random.Random
    ) -> None:
        self.size = 1.0
        self._draw = draw(seed)
        self._served = served
        self._kinds = [kind for kind in WEIGHTS if kind in kinds]
        self._weights = [WEIGHTS[kind] for kind in self._kinds]
        self._forms = Forms() if set(FORMS) & set(self._kinds) else None
        self._bad = bad.cases(served.vocabulary, served.context, served.ranks)
        self.canaries: Sequence[Item] = ()

    def next(self) -> Item:
        """The next request."""
        return self.of(self._draw.choices(self._kinds, self._weights)[0])

    def of(self, kind: str) -> Item:
        """The next request of a kind."""
        if kind == "bad":
            return self._draw.choice(self._bad)
        if kind == "canary":
            return (
                self._sent(self._draw.choice(self.canaries))
                if self.canaries
                else self._sent(self._completion())
            )
        makers: dict[str, Callable[[], Item]] = {
            "chat": self._chat, "completion": self._completion, "generate": self._generate,
            "cancel": self._cancel, "stop": self._stop, "seeded": self._seeded, "logprobs": self._logprobs,
            "many": self._many, "batch": self._batch, "long": self._long, "scored": self._scored,
            "tool_auto": self._tool,
        }  # fmt: skip
        item = makers[kind]() if kind in makers else self._formed(kind)
        return self._sent(item)

    def each_bad(self) -> Sequence[Item]:
        """Every bad request once."""
        return self._bad

    def burst(self, completions: int, group: int) -> list[Item]:
        """So many completions in requests of `group`, each of which may be refused for a full queue."""
        body = {"prompt": self._prompt(3, 6), "max_tokens": BURST_TOKENS, "ignore_eos": True, "n": group}
        one = Item(
            kind="burst",
            path=COMPLETIONS,
            body=body,
            completions=group,
            limit=BURST_TOKENS,
            statuses=frozenset({200, 429}),
        )
        return [one] * -(-completions // group)

    def _sent(self, item: Item) -> Item:
        """The request with a way to a rank, as a stream or not."""
        headers = item.headers
        if self._draw.random() < ROUTED:
            headers = (*headers, ("x-data-parallel-rank", str(self._draw.randrange(self._served.ranks))))
        body = dict(item.body) if isinstance(item.body, dict) else {}
        if self._draw.random() < STREAMED or (item.leave_s is not None and self._draw.random() < 0.7):
            body["stream"] = True
            if item.path != GENERATE:
                body["stream_options"] = {"include_usage": True}
        if self._served.drafts and item.path != GENERATE:
            body["return_speculation_stats"] = True
        return replace(item, body=body, headers=headers)

    def _limit(self, low: int = 2, high: int = 24) -> int:
        return max(low, round(self._draw.randint(low, high) * self.size))

    def _prompt(self, low: int = 2, high: int = 30) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(low, high)))

    def _ids(self, low: int, high: int) -> list[int]:
        return [
            self._draw.randrange(300, self._served.vocabulary) for _ in range(self._draw.randint(low, high))
        ]

    def _sampling(self) -> dict[str, Any]:
        if self._draw.random() < 0.5:
            return {"temperature": 0}
        return {"temperature": 0.8, "top_p": 0.9, "seed": self._draw.randrange(1 << 40)}

    def _chat(self) -> Item:
        limit = self._limit()
        turns = [{"role": "user", "content": self._prompt()}]
        if self._draw.random() < 0.3:
            turns = [
                {"role": "system", "content": "Be brief."},
                *turns,
                {"role": "assistant", "content": "Yes."},
                *turns,
            ]
        return Item(
            kind="chat",
            path=CHAT,
            body={"messages": turns, "max_tokens": limit, **self._sampling()},
            limit=limit,
        )

    def _completion(self, kind: str = "completion", **more: Any) -> Item:
        limit = self._limit()
        body = {"prompt": self._prompt(), "max_tokens": limit, **self._sampling(), **more}
        return Item(kind=kind, path=COMPLETIONS, body=body, limit=limit)

    def _generate(self) -> Item:
        limit = self._limit()
        body = {
            "input_ids": self._ids(1, 40),
            "sampling_params": {"max_new_tokens": limit, "temperature": 0, "ignore_eos": True},
        }
        return Item(kind="generate", path=GENERATE, body=body, limit=limit)

    def _cancel(self) -> Item:
        item = self._draw.choice((self._chat, self._long))()
        assert isinstance(item.body, dict)
        body = {**item.body, "max_tokens": 300, "ignore_eos": True}
        return replace(item, kind="cancel", body=body, limit=300, leave_s=self._draw.random() * LEAVE_S)

    def _stop(self) -> Item:
        stops = self._draw.choice((["e"], [" the", "."], ["a", "o", "\n"]))

        def check(reply: Any) -> list[str]:
            return [
                f"{stop!r} is in {one.text!r}" for one in reply.choices for stop in stops if stop in one.text
            ]

        return replace(self._completion("stop", stop=stops), check=check)

    def _seeded(self) -> Item:
        number = self._draw.randrange(8)
        body = {
            "prompt": " ".join(WORDS[number : number + 5]),
            "max_tokens": 6,
            "temperature": 1.0,
            "seed": number,
        }
        return Item(kind="seeded", path=COMPLETIONS, body=body, limit=6, same=f"seed {number}")

    def _logprobs(self) -> Item:
        if self._draw.random() < 0.5:
            return self._completion("logprobs", logprobs=self._draw.randint(0, 3))
        item = self._chat()
        assert isinstance(item.body, dict)
        more = {"logprobs": True, "top_logprobs": self._draw.randint(0, 3)}
        return replace(item, kind="logprobs", body={**item.body, **more})

    def _many(self) -> Item:
        count = self._draw.randint(2, 4)
        item = self._chat() if self._draw.random() < 0.5 else self._completion()
        assert isinstance(item.body, dict)
        return replace(item, kind="many", body={**item.body, "n": count}, completions=count)

    def _batch(self) -> Item:
        item = self._completion("batch")
        assert isinstance(item.body, dict)
        prompts = [self._prompt(1, 8) for _ in range(self._draw.randint(2, 5))]
        return replace(item, body={**item.body, "prompt": prompts}, completions=len(prompts))

    def _long(self) -> Item:
        most = min(self._served.long, self._served.context // 2)
        body = {"prompt": self._ids(most // 4, most), "max_tokens": 4, "temperature": 0}
        return Item(kind="long", path=COMPLETIONS, body=body, limit=4)

    def _scored(self) -> Item:
        sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
        ids = self._ids(2, self._served.scored)
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        return Item(kind="scored", path=GENERATE, body=body, limit=4)

    def _tool(self) -> Item:
        limit = self._limit(4, 24)
        return Item(
            kind="tool_auto",
            path=CHAT,
            body={**tools(self._prompt(), False), "max_tokens": limit},
            limit=limit,
        )

    def _formed(self, kind: str) -> Item:
        assert self._forms is not None
        makers = {
            "json_schema": self._forms.schema, "regex": self._forms.regex,
            "guided_choice": self._forms.choice, "tool_forced": self._forms.call,
        }  # fmt: skip
        return makers[kind](self._draw, self._prompt())
