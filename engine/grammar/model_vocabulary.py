"""The vocabulary that workers compile for and ranks load for: one function, so that they can't differ."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from engine.errors import ConfigError
from engine.grammar.tokenizer_info import Vocabulary, vocabulary_of
from engine.model.prompt_strings import load_strings
from engine.model.tokenizer import Tokenizer


def model_vocabulary(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]
) -> Vocabulary:
    """Of the model in `folder`; the marker of its tool calls, where it has one, is matched by its id.

    raises  ConfigError as `vocabulary_of`
    """
    try:
        marker = tokenizer.control_ids.get(load_strings(folder).tokens["dsml"])
    except ConfigError:
        # A model without a chat format has no calls.
        marker = None
    return vocabulary_of(tokenizer, vocab_size, stop_ids, () if marker is None else (marker,))
