"""The wording of completion answers: text, echo, and the four parallel lists of log probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from api.intake import Prompt
from api.served import Served
from api.shapes import Framing, Usage, finish_reason, finite, shown_logprobs
from engine.messages import GOES_ON, Delta, PromptLogprob
from engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionPlan:
    """What the answer depends on beyond the tokens.

    prompts        of each choice
    prompt_tokens  each prompt once
    """

    rid: str
    created: int
    prompts: tuple[Prompt, ...]
    prompt_tokens: int
    echo: bool
    logprobs: bool
    with_usage: bool
    continuous: bool
    with_drafts: bool = False


class Columns:
    """OpenAI's log probabilities of a completion; `offset` is where the next token's text begins."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token_id: int, value: float | None, top: Iterable[tuple[int, float]]) -> None:
        """One token; None for the first token of a prompt, which nothing predicts."""
        text = self._tokenizer.token_string(token_id)
        best: dict[str, float] | None = None
        if value is not None:
            best = {self._tokenizer.token_string(one): finite(number) for one, number in top}
            best.setdefault(text, finite(value))
        self._rows.append((text, None if value is None else finite(value), best, self._offset))
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """The columns of what was added since the last call."""
        rows, self._rows = self._rows, []
        return {
            "tokens": [row[0] for row in rows],
            "token_logprobs": [row[1] for row in rows],
            "top_logprobs": [row[2] for row in rows],
            "text_offset": [row[3] for row in rows],
        }


class CompletionChoice:
    """One completion on its way out. `prompt` is None once its echo is out."""

    def __init__(self, prompt: Prompt, plan: CompletionPlan, served: Served) -> None:
        self._served = served
        self._plan = plan
        self._echo: Prompt | None = prompt if plan.echo else None
        self._heard: dict[int, PromptLogprob] = {}
        self.columns = Columns(served.tokenizer)
        self.finish: str | None = None

    def read(self, delta: Delta) -> str:
        """The text that the chunk adds, the echo included; log probabilities go to `columns`."""
        for entry in delta.prompt_logprobs:
            self._heard[entry.position] = entry
        if delta.finish != GOES_ON:
            self.finish = finish_reason(delta.finish)
        if not delta.token_ids and self.finish is None:
            return ""
        text = self._echoed() + delta.text
        if self._plan.logprobs:
            for entry_ in shown_logprobs(delta):
                self.columns.add(entry_.token_id, entry_.value, entry_.top)
        return text

    def _echoed(self) -> str:
        """The prompt, the first time."""
        prompt, self._echo = self._echo, None
        if prompt is None:
            return ""
        if self._plan.logprobs:
            for position, token_id in enumerate(prompt.ids):
                heard = self._heard.get(position)
                self.columns.add(token_id, heard.value if heard else None, heard.top if heard else ())
        if prompt.text is not None:
            return prompt.text
        return self._served.tokenizer.decode(prompt.ids, skip_special=False)


class CompletionAnswer:
    """An `Answer` of /v1/completions."""

    def __init__(self, plan: CompletionPlan, served: Served) -> None:
        self._plan = plan
        self._served = served
        self._choices = [CompletionChoice(prompt, plan, served) for prompt in plan.prompts]
        self._texts = [""] * len(plan.prompts)
        self._usage = Usage(plan.prompt_tokens, plan.with_drafts)
        self._framing = Framing(self._head(), self._usage, plan.with_usage, plan.continuous)

    def opening(self) -> Sequence[bytes]:
        """Nothing: the first text is the first event."""
        return ()

    def gain(self, place: int, delta: Delta) -> Sequence[bytes]:
        """One event, unless the chunk shows nothing yet."""
        text = self._read(place, delta)
        choice = self._choices[place]
        columns = choice.columns.take() if self._plan.logprobs else None
        if not text and choice.finish is None and not (columns and columns["tokens"]):
            return ()
        return [self._framing.chunk(self._choice(place, text, columns))]

    def closing(self) -> Sequence[bytes]:
        """The usage, where it is wanted."""
        return self._framing.last()

    def note(self, place: int, delta: Delta) -> None:
        """Collects."""
        self._texts[place] += self._read(place, delta)

    def whole(self) -> dict[str, Any]:
        """A text_completion."""
        choices = []
        for place, choice in enumerate(self._choices):
            columns = choice.columns.take() if self._plan.logprobs else None
            choices.append(self._choice(place, self._texts[place], columns))
        return {**self._head(), "choices": choices, "usage": self._usage.as_json()}

    def _read(self, place: int, delta: Delta) -> str:
        self._usage.note(delta)
        return self._choices[place].read(delta)

    def _choice(self, place: int, text: str, columns: dict[str, Any] | None) -> dict[str, Any]:
        finish = self._choices[place].finish
        return {"index": place, "text": text, "logprobs": columns, "finish_reason": finish}

    def _head(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "id": plan.rid,
            "object": "text_completion",
            "created": plan.created,
            "model": self._served.name,
        }
