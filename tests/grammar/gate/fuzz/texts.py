"""Text that is nearly right: a few edits of valid text, and short texts that a grammar may allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

ALPHABET = 'abcx019-_ "\\.é😀\n^]'
"""What short texts are made of; it meets the classes and the escapes of the makers."""

LONGEST = 10


def mutated(text: str, chance: random.Random, pieces: Sequence[str]) -> str:
    """The text after one to three edits: pieces put in, characters cut, doubled or moved."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(text) + 1)
        end = min(len(text), at + chance.choice((1, 1, 1, 2, 5)))
        act = chance.randrange(5)
        if act == 0:
            text = text[:at] + text[end:]
        elif act == 1:
            text = text[:at] + 2 * text[at:end] + text[end:]
        elif act == 2:
            rest = text[:at] + text[end:]
            to = chance.randrange(len(rest) + 1)
            text = rest[:to] + text[at:end] + rest[to:]
        else:
            text = text[:at] + chance.choice(pieces) + text[end if act == 3 else at :]
    return text


def short_texts(chance: random.Random, like: Sequence[str], count: int) -> list[str]:
    """Texts of the alphabet, and small changes of texts that are allowed."""
    found = []
    for _ in range(count):
        if like and chance.random() < 0.6:
            found.append(mutated(chance.choice(like), chance, ALPHABET)[: 2 * LONGEST])
        else:
            found.append("".join(chance.choice(ALPHABET) for _ in range(chance.randint(0, LONGEST))))
    return found
