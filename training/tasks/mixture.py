"""The kinds of tasks, their shares, and the endless stream that training reads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from training.tasks import (
    arithmetic,
    control,
    conversations,
    definitions,
    extraction,
    json_deep,
    json_short,
    sequences,
    toolcalls,
)
from training.tasks.corpus import Corpus
from training.tasks.draw import Draw
from training.tasks.example import Example

Split = Literal["train", "heldout"]

KINDS: dict[str, Callable[[Draw, str, Corpus], Example]] = {
    "json": lambda draw, kind, corpus: json_short.generate(draw, kind),
    "json_deep": lambda draw, kind, corpus: json_deep.generate(draw, kind),
    "extraction": extraction.generate,
    "tools": lambda draw, kind, corpus: toolcalls.generate(draw, kind),
    "arithmetic": lambda draw, kind, corpus: arithmetic.generate(draw, kind),
    "sequences": sequences.generate,
    "definitions": definitions.generate,
    "conversations": lambda draw, kind, corpus: conversations.generate(draw, kind),
    "control": lambda draw, kind, corpus: control.generate(draw, kind),
}

# Shares of examples, not of tokens. Short JSON is what the shipped model is judged on, and a small model
# learns to copy by seeing many different values; so it has the largest share though it is the shortest.
WEIGHTS: dict[str, float] = {
    "json": 0.50,
    "json_deep": 0.06,
    "extraction": 0.11,
    "tools": 0.08,
    "arithmetic": 0.06,
    "sequences": 0.09,
    "definitions": 0.03,
    "conversations": 0.05,
    "control": 0.02,
}


def generate(kind: str, seed: int, split: Split = "train", corpus: Corpus | None = None) -> Example:
    """The example of this seed: always the same one, for the same corpus.

    kind    a key of KINDS
    split   "heldout" uses schemas, words, wordings, tools and numbers that "train" never uses
    corpus  texts for the kinds that need some; without it they fall back to made-up text
    """
    return KINDS[kind](Draw(kind, seed, heldout=split == "heldout"), kind, corpus or Corpus())


def stream(
    seed: int,
    corpus: Corpus | None = None,
    weights: Mapping[str, float] = WEIGHTS,
    split: Split = "train",
) -> Iterator[Example]:
    """Examples without end, mixed by `weights`. Streams of different seeds share no example."""
    mix = Draw("mixture", seed, heldout=split == "heldout")
    shares = dict(weights)
    number = seed << 32
    while True:
        yield generate(mix.weighted(shares), number, split, corpus)
        number += 1
