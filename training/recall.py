"""Rows for long-range recall: facts about made-up names in running text, asked for hundreds of ids later.

Natural text of this corpus seldom needs anything from beyond the window, so the indexer would have little to
learn from. One row in `ONE_ROW_IN` of the chat shards is of this kind; tests measure recall at one distance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.tokenizer import Tokenizer
from training.tasks.draw import Draw
from training.tasks.words import noun, proper_name
from training.tokenizer import BOS

ONE_ROW_IN = 14
SHORTEST, LONGEST = 160, 1800


@dataclass(frozen=True, slots=True)
class Fact:
    """Ids of a statement up to the value, and of the value with its full stop."""

    opening: list[int]
    value: list[int]

    @property
    def ids(self) -> list[int]:
        """The whole statement."""
        return self.opening + self.value


def draw_fact(draw: Draw, tokenizer: Tokenizer) -> Fact:
    """A fact that nobody can know without having read it."""
    opening = f"\nThe {noun(draw)} of {proper_name(draw)} {proper_name(draw)} is "
    value = str(draw.integer(100, 99999)) if draw.chance(0.6) else proper_name(draw)
    return Fact(tokenizer.encode_plain(opening), tokenizer.encode_plain(f"{value}.\n"))


def filler(draw: Draw, tokenizer: Tokenizer, paragraphs: Sequence[str], length: int) -> list[int]:
    """`length` ids of paragraphs."""
    ids: list[int] = []
    while len(ids) < length:
        ids += tokenizer.encode_plain(draw.pick(paragraphs) + "\n")
    return ids[:length]


def recall_row(
    draw: Draw, tokenizer: Tokenizer, paragraphs: Sequence[str], length: int
) -> tuple[list[int], list[int]]:
    """`length` ids and marks: facts come back after a random distance, their values are to be predicted."""
    ids = [tokenizer.token_id(BOS)]
    marks = [0]
    due: list[tuple[int, Fact]] = []
    while len(ids) < length:
        ready = [item for item in due if item[0] <= len(ids)]
        if ready:
            due.remove(ready[0])
            fact = ready[0][1]
            piece, piece_marks = fact.ids, [0] * len(fact.opening) + [1] * len(fact.value)
        elif draw.chance(0.5):
            fact = draw_fact(draw, tokenizer)
            piece, piece_marks = fact.ids, [0] * len(fact.ids)
            due.append((len(ids) + draw.integer(SHORTEST, LONGEST), fact))
        else:
            piece = filler(draw, tokenizer, paragraphs, draw.integer(10, 50))
            piece_marks = [0] * len(piece)
        ids += piece
        marks += piece_marks
    return ids[:length], marks[:length]


def recall_at(
    draw: Draw, tokenizer: Tokenizer, paragraphs: Sequence[str], distance: int
) -> tuple[list[int], int]:
    """Ids that state a fact and state it again `distance` ids later; and where the second value begins."""
    fact = draw_fact(draw, tokenizer)
    between = filler(draw, tokenizer, paragraphs, distance - len(fact.ids))
    ids = [tokenizer.token_id(BOS), *fact.ids, *between, *fact.ids]
    return ids, len(ids) - len(fact.value)
