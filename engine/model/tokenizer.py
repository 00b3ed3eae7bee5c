"""Text <-> token ids over a checkpoint's tokenizer.json, and detokenisation one token at a time.

Ids are looked up by string. Text of a client is encoded by a tokenizer that doesn't know the special tokens.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as Library

from engine.errors import ConfigError
from engine.model.segments import Segment

REPLACEMENT = "\ufffd".encode()
"""What an id reads as that the model has and a stand-in's vocabulary hasn't."""


def load_tokenizer(model_path: str | os.PathLike[str], width: int = 0) -> Tokenizer:
    """The tokenizer of the checkpoint in `model_path`.

    width   as Tokenizer has it
    raises  ConfigError where there is none that fits
    """
    path = Path(model_path) / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    return Tokenizer(text, str(path), width)


class Tokenizer:
    """A byte-level BPE tokenizer. Safe to share between threads."""

    def __init__(self, definition: str, source: str = "tokenizer.json", width: int = 0) -> None:
        """definition  the text of a tokenizer.json; `source` names it in errors

        width  of the model's logits, where the vocabulary is another's: ids up to it read as U+FFFD
        """
        try:
            data = json.loads(definition)
            self._full: Library = Library.from_str(definition)
            plain = {**data, "added_tokens": [], "post_processor": None}
            self._plain: Library = Library.from_str(json.dumps(plain, ensure_ascii=False))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ConfigError(f"{source} is not a tokenizer: {error}") from error
        if not _is_byte_level(data.get("decoder")):
            raise ConfigError(f"{source}: only byte-level tokenizers are supported")
        added = data.get("added_tokens") or []
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        self.vocab_size: int = self._full.get_vocab_size(with_added_tokens=True)
        self._width = width

    @property
    def control_ids(self) -> dict[str, int]:
        """String -> id of every added token."""
        return dict(self._added)

    def token_id(self, token: str) -> int:
        """Id of a token by its string. Raises ConfigError where the vocabulary lacks it."""
        found = self._full.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer has no token {token!r}")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Ids of trusted text: special-token strings become their ids; nothing is put before or after."""
        return list(self._full.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a client's text: special-token strings stay ordinary text."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt. Raises ConfigError for a control segment that the vocabulary lacks."""
        ids: list[int] = []
        for text, is_control in segments:
            if is_control:
                ids.append(self.token_id(text))
            else:
                ids += self.encode_plain(text)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; bytes that aren't UTF-8 become U+FFFD. Unknown ids are empty."""
        kept = (self.token_bytes(i) for i in ids if not (skip_special and i in self.special_ids))
        return b"".join(kept).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id outside vocabulary and width."""
        if 0 <= token_id < self.end_id:
            return self._bytes[token_id]
        return REPLACEMENT if self.end_id <= token_id < self._width else b""

    def token_string(self, token_id: int) -> str:
        """One token as text by itself, for log probabilities; partial characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @cached_property
    def end_id(self) -> int:
        """Ids from here on are no tokens."""
        return len(self._bytes)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """Bytes of every id."""
        vocabulary = self._full.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        alphabet = _byte_of_character()
        for token, token_id in vocabulary.items():
            if token in self._added:
                table[token_id] = token.encode("utf-8")
            else:
                table[token_id] = bytes(alphabet[character] for character in token if character in alphabet)
        return table


class Detokenizer:
    """Text of one token stream as it grows: never a part of a character, never U+FFFD for one to come."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """New text that these tokens complete. All pieces and `flush` together equal `Tokenizer.decode`."""
        table = self._tokenizer
        return self._decoder.decode(b"".join(table.token_bytes(i) for i in ids if i not in self._skipped))

    def flush(self) -> str:
        """What is left at the stream's end: U+FFFD for a character that was never finished, else nothing."""
        return self._decoder.decode(b"", final=True)


class SegmentStream:
    """Segments of one token stream as it grows: special tokens by id, everything else as whole characters."""

    def __init__(self, tokenizer: Tokenizer, specials: Iterable[str]) -> None:
        """specials  the special-token strings that are markup, as `PromptStrings.specials`."""
        self._controls = {tokenizer.token_id(token): token for token in specials}
        self._text = Detokenizer(tokenizer, skip_special=False)

    def feed(self, ids: Iterable[int]) -> list[Segment]:
        """Segments that these tokens complete."""
        segments: list[Segment] = []
        for token_id in ids:
            control = self._controls.get(token_id)
            text = self._text.feed([token_id]) if control is None else self._text.flush()
            segments += [(text, False)] if text else []
            segments += [(control, True)] if control is not None else []
        return segments

    def finish(self) -> list[Segment]:
        """The end: a character that was never finished becomes U+FFFD."""
        text = self._text.flush()
        return [(text, False)] if text else []


def _is_byte_level(decoder: object) -> bool:
    """Whether a tokenizer.json's decoder is byte-level, alone or as the one part of a sequence."""
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders")
        return isinstance(parts, list) and len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a byte as a character: itself where printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
