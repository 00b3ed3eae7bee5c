"""What a rank needs for constrained requests: the grammar library, and the pipeline of its steps."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ConfigError
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.matchers_selftest import self_test
from engine.grammar.model_vocabulary import model_vocabulary
from engine.grammar.pipeline import Pipeline
from engine.model.prompt_strings import load_strings
from engine.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class RankGrammars:
    """Of one rank.

    compiling  the library for the model's vocabulary, which has passed the self-test
    pipeline   the masks of the rank's steps
    """

    compiling: Future[Compiler]
    pipeline: Pipeline

    @property
    def compiler(self) -> Compiler:
        """Waits for the library. Raises ConfigError where it fails the self-test."""
        return self.compiling.result()


def begin_compiler(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]
) -> Future[Compiler]:
    """Loads the library on a thread, beside the weights: more than a second, most of it in imports."""

    def load() -> Compiler:
        compiler = Compiler(model_vocabulary(folder, tokenizer, vocab_size, stop_ids), whole_library())
        self_test(compiler)
        return compiler

    with_one = ThreadPoolExecutor(1, thread_name_prefix="grammar library")
    made = with_one.submit(load)
    with_one.shutdown(wait=False)
    return made


def rank_grammars(
    folder: Path, vocab_size: int, stop_ids: Collection[int], device: torch.device, slots: int, width: int
) -> RankGrammars | None:
    """Of the model in `folder`; None where it has no tokenizer, as nobody can constrain text then.

    slots  of the cache
    width  rows of one request that a step chooses tokens from, at most
    """
    try:
        tokenizer = load_tokenizer(folder)
    except ConfigError:
        return None
    pipeline = Pipeline(vocab_size, stop_ids, think_end_of(folder, tokenizer), device, slots, width)
    return RankGrammars(begin_compiler(folder, tokenizer, vocab_size, stop_ids), pipeline)


def think_end_of(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The token that ends a reasoning; None where the model has none."""
    try:
        text = load_strings(folder).tokens["think_end"]
    except ConfigError:
        return None
    return tokenizer.control_ids.get(text)
