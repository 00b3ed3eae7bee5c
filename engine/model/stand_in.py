"""Which tokenizer and chat format a server has: the checkpoint's, or a dummy's: the shipped ones.

A folder with nothing but a config.json is enough to try a geometry. Its text then means nothing, so any
tokenizer will do that the vocabulary has room for. Of a checkpoint that is read a missing file is an error.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from engine.config import NANO, Settings
from engine.errors import ConfigError
from engine.model.tokenizer import Tokenizer, load_tokenizer


def text_folder(settings: Settings, vocab_size: int) -> Path:
    """Where tokenizer.json and the chat format are, of a model with so many token ids."""
    own = Path(settings.model_path)
    lacks = settings.load_format == "dummy" and not (own / "tokenizer.json").exists()
    return NANO if lacks and _shipped(vocab_size).end_id <= vocab_size else own


def tokenizer_for(settings: Settings, vocab_size: int) -> Tokenizer:
    """The tokenizer in `text_folder`; ids that a stand-in doesn't have read as U+FFFD.

    raises  ConfigError where there is none that fits
    """
    if stands_in(settings, vocab_size):
        return _shipped(vocab_size)
    try:
        return load_tokenizer(settings.model_path)
    except ConfigError as error:
        if settings.load_format != "dummy" or (Path(settings.model_path) / "tokenizer.json").exists():
            raise
        shipped = _shipped(vocab_size).end_id
        raise ConfigError(
            f"{error}; the shipped one, of {shipped} tokens, can't stand in for a dummy's of {vocab_size}"
        ) from error


def stands_in(settings: Settings, vocab_size: int) -> bool:
    """Whether the shipped tokenizer does."""
    return text_folder(settings, vocab_size) != Path(settings.model_path)


def told_of_stand_in(settings: Settings, vocab_size: int) -> str:
    """One line on what stands in."""
    return (
        f"{settings.model_path} has no tokenizer.json: the shipped tokenizer and chat format stand in "
        f"for the dummy's; ids from {_shipped(vocab_size).end_id} to {vocab_size - 1} read as U+FFFD"
    )


@lru_cache(1)
def _shipped(vocab_size: int) -> Tokenizer:
    return load_tokenizer(NANO, vocab_size)
