"""The vocabulary as the grammar library sees it: bytes of every token, which ones stop, and a digest of all.

The library counts special tokens as ordinary text. Here their bytes are blank, so that no grammar allows one
inside a string; the ids that stop are told apart from text by their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property
from typing import Protocol

import msgspec

from engine.errors import ConfigError


class TokenTable(Protocol):
    """What is read of a tokenizer."""

    @property
    def control_ids(self) -> dict[str, int]:
        """String -> id of every added token."""

    @property
    def end_id(self) -> int:
        """Ids from here on are no tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for."""


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """All that decides a token mask, besides the grammar.

    tokens    bytes of each id below the width of the model's logits; empty: never allowed as text
    stop_ids  ascending; they end a grammar
    """

    tokens: tuple[bytes, ...]
    stop_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        """Width of the logits; masks are ceil(size / 32) words wide."""
        return len(self.tokens)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over width, stop ids, and each token with its length."""
        text = hashlib.sha256(f"raw {self.size} {self.stop_ids}".encode())
        for token in self.tokens:
            text.update(len(token).to_bytes(4, "little") + token)
        return text.hexdigest()

    def wire(self) -> bytes:
        """For another process; `from_wire` reads it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_wire(cls, data: bytes) -> Vocabulary:
        """What `wire` wrote."""
        return msgspec.msgpack.decode(data, type=cls)


UNREADABLE = b"\xff"
"""A byte that no UTF-8 text has: a token of it is never text, but a grammar may ask for it by its id."""


def vocabulary_of(
    tokenizer: TokenTable, vocab_size: int, stop_ids: Collection[int], matched_ids: Collection[int] = ()
) -> Vocabulary:
    """The vocabulary of a model.

    vocab_size  width of the model's logits, padding included; ids beyond the tokenizer's are blank
    stop_ids    ids at which a model ends, at least one
    matched_ids special tokens that grammars match by id, as tool calls do with their marker: the library
                accepts no blank token, even by its id
    raises      ConfigError for a stop id outside the logits, or where there is none
    """
    if not stop_ids or not all(0 <= one < vocab_size for one in stop_ids):
        raise ConfigError(f"stop ids {sorted(stop_ids)} don't fit logits of width {vocab_size}")
    blank = set(tokenizer.control_ids.values()) - set(stop_ids) | {*range(tokenizer.end_id, vocab_size)}
    instead = dict.fromkeys(blank, b"") | dict.fromkeys(matched_ids, UNREADABLE)
    tokens = tuple(
        instead[one] if one in instead else tokenizer.token_bytes(one) for one in range(vocab_size)
    )
    return Vocabulary(tokens, tuple(sorted(stop_ids)))
