"""Within one block of drafts: a grammar that ends or begins there, and illegal drafts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.errors import Unexpected
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher
from engine.grammar.pipeline import Pipeline
from engine.messages import STOP_EOS, Sampling, SlotBind
from engine.runner.masking import OVER, MaskGroups, Masks
from tests.grammar.pipeline.stage import (
    CPU,
    THINK_END,
    WORDS,
    Served,
    follows,
    matcher_of,
    submit,
    tokenizer,
)
from tests.grammar.service.stage import STOP, WIDTH
from tests.runner.scripted_drafter import ScriptedDrafter

BLOCK = 5
LETTERS = GrammarKey("ebnf", r'root ::= "a" "b" "c"')
ANY = 300
"""A token of plain text."""


def drafting(*drafted: int, block: int = BLOCK) -> tuple[Served, ScriptedDrafter]:
    """A rank whose drafter says these tokens behind a prompt of one token, then ANY."""
    drafter = ScriptedDrafter(block, (1, 2), WIDTH)
    drafter.check_anchors, drafter.samples = False, True
    served = Served(drafter)  # type: ignore[arg-type]
    drafter.texts = {slot: [0, *drafted, *[ANY] * 60] for slot in range(1, 9)}
    return served, drafter


def letters() -> list[int]:
    """The tokens of the one sentence of LETTERS, letter by letter."""
    return [*(tokenizer().encode(one)[0] for one in "abc"), STOP]


@pytest.mark.parametrize(("block", "verified"), [(BLOCK, 3), (3, 4)])
def test_a_grammar_that_ends_within_a_block_keeps_its_last_token_and_nothing_behind(
    block: int, verified: int
) -> None:
    """Rows behind the end aren't verified, but for the one behind the last draft."""
    # Bias makes each letter a token, so that the draft is right about all of them and runs over the end.
    bias = tuple((token, 90.0) for token in letters()[:3])
    served, _ = drafting(*letters(), block=block)
    item = submit(1, "x", LETTERS, logit_bias=bias, ignore_eos=True)
    prompt = np.array([7], np.int32).tobytes()
    item = type(item)(1, prompt, item.sampling, grammar_key=item.grammar_key, grammar=item.grammar)
    served.run(item)
    assert served.text[1] == letters()
    assert served.finish[1][0] == STOP_EOS
    ending = [done for done in served.done if done.ended]
    assert len(ending) == 1
    # The first token came with the prompt, the others, EOS among them, with one block.
    assert ending[0].counts == bytes([3])
    assert ending[0].verified == bytes([verified])
    assert np.frombuffer(ending[0].lengths, np.int32).tolist() == [1 + 3]
    assert served.rank._results.cut == {"grammar_end": int(verified > 3), "stop": 0, "max_tokens": 0}
    for done in served.done[served.done.index(ending[0]) + 1 :]:
        assert not any(done.counts)
    served.close()


def test_illegal_drafts_are_never_emitted() -> None:
    served, _ = drafting(*[ANY] * 8)
    served.run(submit(1, "Say", WORDS), submit(2, "Say", LETTERS))
    assert follows(WORDS, served.text[1])
    assert follows(LETTERS, served.text[2])
    served.close()


# ---- the pipeline by itself ----------------------------------------------------------------------

END = tokenizer().control_ids[THINK_END]
A, B, C = letters()[:3]


class Steps:
    """A pipeline whose steps are told by hand: one request a slot, behind a prompt of 3 tokens."""

    def __init__(self, budget_s: float = 10.0) -> None:
        self.pipeline = Pipeline(WIDTH, [STOP], END, CPU, 5, BLOCK + 1, budget_s)
        self.behind: dict[int, int] = {}
        self.epoch = 0

    def enter(self, slot: int, key: GrammarKey, after_think: bool = False) -> Matcher:
        matcher = matcher_of(key)
        self.pipeline.enter(slot, matcher, 3, after_think)
        assert not self.pipeline.bind(SlotBind(slot, 1, slot, 0, Sampling(9), 3, constrained=True))
        self.behind[slot] = 3
        return matcher

    def masks(self, *drafts: tuple[int, list[int]]) -> tuple[Masks, list[list[int]]]:
        """The step's masks, and of each row the letters, EOS, END and ANY that it allows."""
        self.epoch += 1
        tokens = torch.zeros(len(drafts), BLOCK + 1, dtype=torch.int64)
        for row, (_, own) in enumerate(drafts):
            tokens[row, 1 : 1 + len(own)] = torch.tensor(own, dtype=torch.int64)
        slots = np.array([slot for slot, _ in drafts])
        anchors = np.array([self.behind[slot] for slot, _ in drafts])
        widths = np.array([len(own) + 1 for _, own in drafts])
        self.pipeline.begin(self.epoch, self.epoch % 2, MaskGroups(slots, anchors, widths, tokens))
        found = self.pipeline.finish(self.epoch)
        logits = torch.zeros(int(widths.sum()), WIDTH)
        found.words(logits)
        some = (A, B, C, STOP, END, ANY)
        return found, [[token for token in some if row[token] == 0] for row in logits]

    def keep(self, *runs: tuple[int, list[int]]) -> list[bool]:
        for slot, run in runs:
            self.behind[slot] += len(run)
        return self.pipeline.retain(self.epoch, [run for _, run in runs])


@pytest.fixture
def steps() -> Iterator[Steps]:
    found = Steps()
    yield found
    found.pipeline.close()


def test_each_row_allows_what_may_follow_its_draft(steps: Steps) -> None:
    steps.enter(1, LETTERS)
    found, rows = steps.masks((1, [A, B, C, STOP, ANY]))
    assert rows[:4] == [[A], [B], [C], [STOP]]
    assert (found.lengths.tolist(), found.most.tolist(), found.failed) == ([3], [4], {})
    assert steps.keep((1, [A])) == [False]
    found, rows = steps.masks((1, [ANY, B]))
    assert rows[0] == [B]
    assert found.most.tolist() == [3]
    assert steps.keep((1, [B, C, STOP])) == [True]
    found, _ = steps.masks((1, []))
    assert (found.lengths.tolist(), found.most.tolist()) == ([OVER], [0])


@pytest.mark.parametrize("place", range(1, 5))
def test_a_grammar_begins_behind_a_reasoning_that_ends_within_a_block(steps: Steps, place: int) -> None:
    """Until then everything but the end of the text is allowed."""
    matcher = steps.enter(1, LETTERS, after_think=True)
    thought = [ANY] * (place - 1)
    drafts = [*thought, END, A, B, C, STOP][:BLOCK]
    found, rows = steps.masks((1, drafts))
    assert rows[:place] == [[A, B, C, END, ANY]] * place
    assert rows[place : place + 3] == [[A], [B], [C]][: BLOCK + 1 - place]
    steps.keep((1, [*thought, END, A]))
    found, rows = steps.masks((1, [B]))
    assert rows == [[B], [C]]
    assert found.lengths.tolist() == [3 + place + 1]
    assert matcher.tokens == 1


def test_a_reasoning_goes_on_over_steps(steps: Steps) -> None:
    matcher = steps.enter(1, LETTERS, after_think=True)
    for _ in range(3):
        _, rows = steps.masks((1, [ANY, A]))
        assert rows == [[A, B, C, END, ANY]] * 3
        steps.keep((1, [ANY, A]))
    steps.masks((1, []))
    steps.keep((1, [END]))
    assert steps.masks((1, []))[1] == [[A]]
    assert matcher.tokens == 0


def test_what_goes_wrong_on_the_thread_is_raised_where_masks_are_taken(steps: Steps) -> None:
    """Tokens that no step named: the machine refuses them, and the rank ends."""
    steps.enter(1, LETTERS)
    steps.masks((1, []))
    steps.keep((1, [A]))
    steps.behind[1] += 1
    with pytest.raises(Unexpected):
        steps.masks((1, []))


def test_masks_take_turns_and_are_those_of_their_step(steps: Steps) -> None:
    steps.enter(1, LETTERS)
    first, _ = steps.masks((1, []))
    steps.keep((1, [A]))
    second, rows = steps.masks((1, []))
    assert rows == [[B]]
    logits = torch.zeros(1, WIDTH)
    first.words(logits)
    assert logits[0, A] == 0
    assert logits[0, B] == -torch.inf
    assert second.lengths.tolist() == [4]
