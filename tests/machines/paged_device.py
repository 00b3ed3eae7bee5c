"""A device without a model: its tokens are a function of what it reads through the page tables.

Each position keeps a number made of the number before it, its token and the token that leaves the window. The
next token is taken from it, so a page that was freed too early, shared by mistake or filled in a wrong order
shows as a wrong text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.config import PAGE_TOKENS
from engine.messages import RunStep, SlotBind, StepDone, Submit

VOCABULARY = 50
EOS = 1
WINDOW = 128
FAILING = VOCABULARY
"""A sampled token that stands for a row whose sampling fails: one in ten thousand."""

Cell = tuple[int, int]
"""(token, number) of one position."""


def following(number: int, token: int, leaving: int) -> int:
    """The number of a position: of the number before it, its token and that a window behind it (-1 none)."""
    return (number * 6364136223846793005 + token * 1442695040888963407 + leaving * 97 + 11) % (1 << 61)


def sampled(number: int, seed: int) -> int:
    """The token after a position with this number."""
    drawn = (number ^ (seed * 2654435761)) // 7
    return FAILING if drawn % 9973 == 0 else drawn % VOCABULARY


@dataclass
class Slot:
    """What the device knows of one slot."""

    bind: SlotBind
    length: int = 0
    relay: int = -1
    pages: dict[int, tuple[int, int]] = field(default_factory=dict)


class PagedDevice:
    """Runs steps in order. Any slot, generation, start or page that doesn't fit is an AssertionError."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.full: dict[int, dict[int, Cell]] = {}
        self.window: dict[int, dict[int, Cell]] = {}
        self.steps = 0

    def execute(self, step: RunStep) -> StepDone:
        """The results of one step."""
        self.steps += 1
        for bind in step.binds:
            before = self.slots.get(bind.slot)
            assert before is None or before.bind.generation < bind.generation
            self.slots[bind.slot] = Slot(bind)
        for slot, logical, full, window in np.frombuffer(step.pages, np.int32).reshape(-1, 4).tolist():
            assert full > 0
            assert window > 0
            self.slots[slot].pages[logical] = (full, window)
            self.full[full], self.window[window] = {}, {}
        return self._rows(step)

    def _rows(self, step: RunStep) -> StepDone:
        columns = (step.slots, step.generations, step.starts, step.counts)
        rows = list(zip(*[np.frombuffer(column, np.int32).tolist() for column in columns], strict=True))
        fed = np.frombuffer(step.tokens, np.int32).tolist()
        assert len({row[0] for row in rows}) == len(rows)
        assert len(fed) == sum(row[3] for row in rows)
        counts, tokens, failed = bytearray(), [], []
        for place, (slot, generation, start, count) in enumerate(rows):
            state = self.slots[slot]
            assert state.bind.generation == generation
            assert state.length == start
            for token in fed[:count]:
                assert token != -1 or count == 1
                number = self._feed(state, state.relay if token == -1 else token)
            del fed[:count]
            token = sampled(number, state.bind.sampling.seed)
            if not step.samples[place]:
                counts.append(0)
            elif token == FAILING:
                counts.append(0)
                failed.append((place, "no token has a probability"))
                state.relay = 0  # A step that is queued already runs on, in vain.
            else:
                counts.append(1)
                tokens.append(token)
                state.relay = token
        return StepDone(step.epoch, bytes(counts), np.array(tokens, np.int32).tobytes(), tuple(failed))

    def _feed(self, state: Slot, token: int) -> int:
        position = state.length
        assert token >= 0
        before = self._read(self.full, state, position - 1, 0)
        behind = self._read(self.window, state, position - WINDOW + 1, 1)
        number = following(before[1], token, behind[0])
        full, window = state.pages[position // PAGE_TOKENS]
        self.full[full][position % PAGE_TOKENS] = (token, number)
        self.window[window][position % PAGE_TOKENS] = (token, number)
        state.length += 1
        return number

    def _read(self, pool: dict[int, dict[int, Cell]], state: Slot, position: int, which: int) -> Cell:
        if position < 0:
            return (-1, state.bind.request_id)
        page = state.pages[position // PAGE_TOKENS][which]
        return pool[page].get(position % PAGE_TOKENS, (-2, -2))


def expected_output(item: Submit, context: int) -> tuple[list[int], bool]:
    """What the request generates alone: (tokens, whether its sampling fails after them)."""
    prompt = np.frombuffer(item.prompt, np.int32).tolist()
    how = item.sampling
    most = min(how.max_new_tokens, context - len(prompt))
    tokens = list(prompt)
    number = item.request_id
    fed = 0
    while True:
        while fed < len(tokens):
            leaving = tokens[fed - WINDOW + 1] if fed >= WINDOW - 1 else -1
            number = following(number, tokens[fed], leaving)
            fed += 1
        token = sampled(number, how.seed)
        if token == FAILING:
            return tokens[len(prompt) :], True
        tokens.append(token)
        generated = len(tokens) - len(prompt)
        ends = token in how.stop_token_ids or (token == EOS and not how.ignore_eos)
        if (ends and generated > how.min_new_tokens) or generated == most:
            return tokens[len(prompt) :], False
