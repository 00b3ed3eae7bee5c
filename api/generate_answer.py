"""The wording of /generate answers: text, ids and meta_info; streams carry the text so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api.intake import Prompt
from api.shapes import finite
from engine.messages import GOES_ON, LENGTH, Delta, PromptLogprob, TokenLogprob
from engine.model.tokenizer import Tokenizer

Triple = tuple[float | None, int, str | None]


@dataclass(frozen=True, slots=True)
class Item:
    """One completion's id and prompt."""

    rid: str
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratePlan:
    """What the answer depends on beyond the tokens.

    single       one object rather than a list
    top          the best tokens are listed beside the chosen ones
    prompt_from  first prompt position with a log probability; -1 for none
    texts        log probabilities carry their token's text
    drafts       what became of drafted tokens is said
    """

    items: tuple[Item, ...]
    single: bool
    logprobs: bool
    top: bool
    prompt_from: int
    texts: bool
    drafts: bool
    received_s: float
    wall_s: Callable[[], float]


class Progress:
    """One completion so far."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt: dict[int, PromptLogprob] = {}
        self.finish: dict[str, Any] | None = None
        self.drafts = (0, 0, 0)

    def read(self, delta: Delta) -> None:
        """Adds a chunk."""
        self.text += delta.text
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        for entry in delta.prompt_logprobs:
            self.prompt[entry.position] = entry
        self.drafts = delta.drafts
        if delta.finish == LENGTH:
            self.finish = {"type": "length", "length": len(self.ids)}
        elif delta.finish != GOES_ON:
            self.finish = {"type": "stop", "matched": delta.matched}


class GenerateAnswer:
    """An `Answer` of /generate. `ranks`: where each item runs."""

    def __init__(self, plan: GeneratePlan, tokenizer: Tokenizer, ranks: Sequence[int]) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._ranks = ranks
        self._progress = [Progress() for _ in plan.items]

    def opening(self) -> Sequence[bytes]:
        """Nothing."""
        return ()

    def gain(self, place: int, delta: Delta) -> Sequence[bytes]:
        """One event with everything so far."""
        self._progress[place].read(delta)
        value = self._object(place)
        if not self._plan.single:
            value["index"] = place
        return [orjson.dumps(value)]

    def closing(self) -> Sequence[bytes]:
        """Nothing."""
        return ()

    def note(self, place: int, delta: Delta) -> None:
        """Collects."""
        self._progress[place].read(delta)

    def whole(self) -> Any:
        """One object, or a list in the order of the input."""
        objects = [self._object(place) for place in range(len(self._plan.items))]
        return objects[0] if self._plan.single else objects

    def _object(self, place: int) -> dict[str, Any]:
        progress, item = self._progress[place], self._plan.items[place]
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": progress.finish,
            "prompt_tokens": len(item.prompt.ids),
            "completion_tokens": len(progress.ids),
            "cached_tokens": 0,
            "e2e_latency": self._plan.wall_s() - self._plan.received_s,
            "dp_rank": self._ranks[place],
        }
        if self._plan.drafts:
            names = ("spec_verify_ct", "spec_draft_token_num", "spec_accept_token_num")
            meta |= zip(names, progress.drafts, strict=True)
        if self._plan.logprobs:
            meta |= self._logprobs(progress, item)
        return {"text": progress.text, "output_ids": progress.ids, "meta_info": meta}

    def _logprobs(self, progress: Progress, item: Item) -> dict[str, Any]:
        """Triples [logprob, token id, text or null] of output and, where wanted, prompt."""
        shown: dict[str, Any] = {
            "output_token_logprobs": [self._triple(one.value, one.token_id) for one in progress.logprobs]
        }
        if self._plan.top:
            shown["output_top_logprobs"] = [self._top(one.top) for one in progress.logprobs]
        if self._plan.prompt_from >= 0:
            positions = range(self._plan.prompt_from, len(item.prompt.ids))
            heard = [(item.prompt.ids[at], progress.prompt.get(at)) for at in positions]
            shown["input_token_logprobs"] = [
                self._triple(one.value if one else None, token) for token, one in heard
            ]
            if self._plan.top:
                shown["input_top_logprobs"] = [self._top(one.top) if one else None for _, one in heard]
        return shown

    def _top(self, top: Sequence[tuple[int, float]]) -> list[Triple]:
        return [self._triple(value, token) for token, value in top]

    def _triple(self, value: float | None, token_id: int) -> Triple:
        text = self._tokenizer.token_string(token_id) if self._plan.texts else None
        return (None if value is None else finite(value), token_id, text)
