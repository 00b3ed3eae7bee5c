"""Held-out prompts by kind and length, and pass rates kind by kind, as a total hides a broken format."""

from collections.abc import Callable, Iterator
from itertools import count, islice

from engine.model.encoding import Encoding
from engine.model.tokenizer import Tokenizer
from training.tasks.checking import check
from training.tasks.corpus import Corpus
from training.tasks.example import Example
from training.tasks.mixture import generate
from training.tasks.render import prompt_ids

Prompt = tuple[Example, list[int]]
Complete = Callable[[list[list[int]]], list[list[int]]]

# The length up to which the shipped model has to answer short JSON without a grammar.
SHORT_PROMPT = 110


def heldout_prompts(
    kind: str,
    number: int,
    encoding: Encoding,
    tokenizer: Tokenizer,
    *,
    longest: int = SHORT_PROMPT,
    corpus: Corpus | None = None,
) -> list[Prompt]:
    """The first `number` held-out examples of a kind whose prompt has at most `longest` ids, with those ids."""
    return list(islice(_fitting(kind, encoding, tokenizer, longest, corpus), number))


def _fitting(
    kind: str, encoding: Encoding, tokenizer: Tokenizer, longest: int, corpus: Corpus | None
) -> Iterator[Prompt]:
    for seed in count():
        example = generate(kind, seed, "heldout", corpus)
        ids = prompt_ids(example, encoding, tokenizer)
        if len(ids) <= longest:
            yield example, ids


def pass_rate(prompts: list[Prompt], complete: Complete, tokenizer: Tokenizer) -> float:
    """Share of prompts whose completion is right.

    complete  prompt ids of each example -> the ids that the model wrote, EOS included or not
    """
    answers = complete([ids for _, ids in prompts])
    texts = (tokenizer.decode(ids, skip_special=False) for ids in answers)
    passed = sum(check(example, text) for (example, _), text in zip(prompts, texts, strict=True))
    return passed / len(prompts)
