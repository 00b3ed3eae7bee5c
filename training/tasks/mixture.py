"""The kinds of tasks, their shares, and the endless stream that training reads."""

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from training.tasks import arithmetic, json_deep, json_short, sequences, toolcalls
from training.tasks.corpus import Corpus
from training.tasks.draw import Draw
from training.tasks.example import Example

Split = Literal["train", "heldout"]
Generator = Callable[[Draw, str, Corpus], Example]

KINDS: dict[str, Generator] = {
    "json": lambda draw, kind, corpus: json_short.generate(draw, kind),
    "json_deep": lambda draw, kind, corpus: json_deep.generate(draw, kind),
    "arithmetic": lambda draw, kind, corpus: arithmetic.generate(draw, kind),
    "sequences": sequences.generate,
    "tools": lambda draw, kind, corpus: toolcalls.generate(draw, kind),
}

# Shares of examples, not of tokens. Short JSON is what the shipped model is judged on.
WEIGHTS: dict[str, float] = {
    "json": 0.4,
    "json_deep": 0.08,
    "arithmetic": 0.1,
    "sequences": 0.1,
    "tools": 0.12,
}


def generate(kind: str, seed: int, split: Split = "train", corpus: Corpus | None = None) -> Example:
    """The example of this seed: always the same one, for the same corpus.

    kind    a key of KINDS
    split   "heldout" uses schemas, words, templates, tools and numbers that "train" never uses
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
    number = seed << 32
    while True:
        yield generate(mix.weighted(dict(weights)), number, split, corpus)
        number += 1
