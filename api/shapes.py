"""Parts of answers that several routes share: usage, finish reasons, log probabilities, chunk framing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine.messages import LENGTH, STOP_EOS, STOP_TOKEN, Delta, TokenLogprob
from engine.model.tokenizer import Tokenizer


class Usage:
    """Tokens of one HTTP request: each prompt once, all completions.

    with_drafts  the object says what became of drafted tokens
    """

    __slots__ = ("accepted", "completion", "prompt", "verified", "with_drafts")

    def __init__(self, prompt: int, with_drafts: bool = False) -> None:
        self.prompt = prompt
        self.completion = 0
        self.with_drafts = with_drafts
        self.verified = self.accepted = 0

    def note(self, delta: Delta) -> None:
        """Adds a chunk."""
        self.completion += len(delta.token_ids)
        _, verified, accepted = delta.drafts
        self.verified += verified
        self.accepted += accepted

    def as_json(self) -> dict[str, Any]:
        """The OpenAI object. Nothing is reused from a cache, which `cached_tokens` says."""
        usage = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        if self.with_drafts:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.verified - self.accepted,
            }
        return usage


class Framing:
    """The parts of a stream's chunks that don't change, encoded once.

    with_usage   chunks carry `usage`: null, but for the last one
    continuous   chunks carry the usage so far
    """

    def __init__(self, head: dict[str, Any], usage: Usage, with_usage: bool, continuous: bool) -> None:
        self._head = orjson.dumps(head)[:-1]
        self._usage = usage
        self._continuous = continuous
        self._null_usage = b',"usage":null' if with_usage else b""
        self.with_usage = with_usage

    def chunk(self, choice: dict[str, Any]) -> bytes:
        """A chunk with one choice."""
        usage = b',"usage":' + orjson.dumps(self._usage.as_json()) if self._continuous else self._null_usage
        return b'%b,"choices":[%b]%b}' % (self._head, orjson.dumps(choice), usage)

    def last(self) -> list[bytes]:
        """The chunk with the usage and no choices, where it is wanted."""
        if not self.with_usage:
            return []
        return [b'%b,"choices":[],"usage":%b}' % (self._head, orjson.dumps(self._usage.as_json()))]


def finish_reason(finish: int) -> str:
    """OpenAI's word for a finish code that isn't an error."""
    return "length" if finish == LENGTH else "stop"


def shown_logprobs(delta: Delta) -> Sequence[TokenLogprob]:
    """The chunk's entries without that of an EOS or stop token, which is no text."""
    return delta.logprobs[:-1] if delta.finish in (STOP_EOS, STOP_TOKEN) else delta.logprobs


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Chat's shape: the chosen token, then the best ones, with their bytes."""
    return [
        {
            **_chat_token(entry.token_id, entry.value, tokenizer),
            "top_logprobs": [_chat_token(token, value, tokenizer) for token, value in entry.top],
        }
        for entry in entries
    ]


def _chat_token(token_id: int, value: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": tokenizer.token_string(token_id),
        "logprob": finite(value),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def finite(value: float) -> float:
    """Minus infinity, which JSON lacks, as the number that clients know for it."""
    return max(value, -9999.0)
