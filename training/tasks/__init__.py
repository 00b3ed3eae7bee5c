"""Synthetic tasks for the chat phase: examples from a seed, with the reply that is wanted and a judge.

    from training.tasks import Corpus, check, generate, render, stream

Standard library only, beside the engine's own encoder and tokenizer.
"""

from training.tasks.checking import answer_text, check
from training.tasks.corpus import Corpus
from training.tasks.example import Example
from training.tasks.mixture import KINDS, WEIGHTS, generate, stream
from training.tasks.render import Rendered, prompt_ids, render

__all__ = [
    "Corpus",
    "Example",
    "KINDS",
    "Rendered",
    "WEIGHTS",
    "answer_text",
    "check",
    "generate",
    "prompt_ids",
    "render",
    "stream",
]
