"""Batched traversals against single calls of the library, and what a matcher keeps of verified tokens."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError, GrammarDiverged, GrammarRefused, ShapeMismatch
from engine.grammar import matchers, matchers_selftest
from engine.grammar.compiler import Compiler, compiled_of, whole_library
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import DEAD, ENDED, FREE, MASKED, Chain, Matcher, MatcherBatch
from engine.grammar.matchers_selftest import chains_agree, one_by_one, self_test
from engine.grammar.tokenizer_info import Vocabulary
from tests.grammar.service.stage import STOP, WIDTH, strings, vocabulary

PATIENT = 50_000
"""In terms of a budget: what the host does to the clock fails nobody here."""

GRAMMARS = [
    r'root ::= "{" ("\"" [a-z]+ "\"" ":" [0-9]+ ","?)* "}"',
    r'root ::= [a-zA-Z0-9 .,]{0,40} "!"',
    'root ::= item ("," item)*\nitem ::= "[" item? "]" | "x"',
    r'root ::= "yes" | "no" | "né" | "日本"',
]


@cache
def compiler() -> Compiler:
    return Compiler(vocabulary(), whole_library())


def matcher(ebnf: str, *tokens: int) -> Matcher:
    found = Matcher(compiled_of(compiler().compile(GrammarKey("ebnf", ebnf))), WIDTH)
    found.advance(tokens)
    return found


def allowed(handle: Any) -> list[int]:
    mask = np.zeros((1, WIDTH // 32), np.int32)
    handle.fill_next_token_bitmask(mask, 0, False)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8).reshape(-1), bitorder="little")).tolist()


def walk(handle: Any, chance: random.Random, steps: int) -> list[int]:
    """Random legal tokens, ending where the grammar ends; the matcher is as before."""
    tokens: list[int] = []
    while len(tokens) < steps and not handle.is_terminated():
        tokens.append(chance.choice(allowed(handle)))
        assert handle.accept_token(tokens[-1], False)
    handle.rollback(len(tokens))
    return tokens


def test_the_library_passes_the_self_test_and_a_start_says_nothing_of_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    self_test(compiler())
    assert capfd.readouterr() == ("", "")  # The library writes its warnings to the descriptor itself.


def test_the_self_test_notices_another_traversal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers_selftest, "chains_agree", lambda *_: False)
    with pytest.raises(ConfigError, match="chains have the masks of single calls"):
        self_test(compiler())


@pytest.mark.parametrize("broken", ["_walk", "_settle", "_close"])
def test_the_comparison_of_chains_notices_what_is_left_out(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MatcherBatch, broken, lambda *_: None)
    handle = compiler().compile(matchers_selftest.QUOTED)
    assert not chains_agree(vocabulary(), handle)


def test_control_tokens_that_the_library_takes_for_text_fail_the_self_test() -> None:
    words = vocabulary()
    spelled = tuple(data or b"<control>" for data in words.tokens)
    library = Compiler(Vocabulary(spelled, words.stop_ids), whole_library())
    library.vocabulary = words
    with pytest.raises(ConfigError, match="control tokens are no text"):
        self_test(library)


def test_random_chains_have_the_masks_of_single_calls() -> None:
    chance = random.Random(3)
    batch = MatcherBatch(WIDTH, [STOP], 400, budget_s=10.0)
    kinds = set()
    for _ in range(12):
        chains = []
        for ebnf in GRAMMARS * 3:
            one = matcher(ebnf)
            path = walk(one.handle, chance, 12)
            begun = chance.randrange(len(path))
            one.advance(path[:begun])
            ids = [chance.randrange(WIDTH), *path[begun : begun + 5]]
            if chance.random() < 0.5:
                ids[chance.randrange(len(ids))] = chance.choice(
                    [-1, WIDTH, 2**31 - 1, chance.randrange(WIDTH)]
                )
            ids += [chance.randrange(WIDTH) for _ in range(chance.randrange(3))]
            root = 0
            if chance.random() < 0.3:
                root = chance.randrange(4)
                ids = [chance.randrange(WIDTH) for _ in range(root)] + ids
            chains.append(Chain(one, np.array(ids, np.int32), root))
        before = [(chain.matcher.generation, chain.matcher.tokens) for chain in chains]
        found = batch.traverse(chains)
        expected = [one_by_one(chain, vocabulary()) for chain in chains]
        masks, wanted = (np.concatenate(columns) for columns in zip(*expected, strict=True))
        np.testing.assert_array_equal(found.kinds, wanted)
        np.testing.assert_array_equal(found.bitmask, masks)
        assert [(chain.matcher.generation, chain.matcher.tokens) for chain in chains] == before
        kinds |= set(found.kinds.tolist())
    assert kinds == {FREE, MASKED, ENDED, DEAD}


def test_a_loaded_grammar_has_equal_masks_along_random_legal_texts() -> None:
    chance = random.Random(5)
    for key in [*(GrammarKey("ebnf", ebnf) for ebnf in GRAMMARS), strings("a")]:
        handle = compiler().compile(key)
        loaded = compiler().deserialize(compiler().serialize(handle))
        for _ in range(8):
            one, other = compiler().matcher(handle), compiler().matcher(loaded)
            for token in walk(one, chance, 25):
                assert allowed(one) == allowed(other)
                assert one.accept_token(token, False)
                assert other.accept_token(token, False)
            assert one.is_terminated() == other.is_terminated()


def test_a_matcher_keeps_the_token_that_ends_it_and_none_behind() -> None:
    one = matcher('root ::= "ab"')
    a, b = (vocabulary().tokens.index(text) for text in (b"a", b"b"))
    assert one.advance([a]) == (1, False)
    assert one.advance([b, STOP, a, 5]) == (2, True)
    assert one.advance([a]) == (0, True)
    assert (one.tokens, one.generation) == (3, 2)


@pytest.mark.parametrize("wrong", [-1, WIDTH, 2**31, 3])
def test_a_token_that_is_not_allowed_leaves_the_matcher_as_it_was(wrong: int) -> None:
    one = matcher('root ::= "ab"')
    a, b = (vocabulary().tokens.index(text) for text in (b"a", b"b"))
    with pytest.raises(GrammarDiverged, match=f"token {wrong}, number 1 "):
        one.advance([a, wrong])
    assert (one.tokens, one.generation, one.terminated) == (0, 0, False)
    assert one.advance([a, b, STOP]) == (3, True)


def test_a_slow_chain_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every accepted token of this grammar takes longer than the one before."""
    monkeypatch.setattr(matchers, "PATIENCE", PATIENT)
    a = vocabulary().tokens.index(b"a")
    slow = matcher('root ::= root root | "a" | ""', *[a] * 60)
    quick = matcher('root ::= "a"*')
    batch = MatcherBatch(WIDTH, [STOP], 40, budget_s=0.002)
    chains = [Chain(quick, np.full(6, a, np.int32)), Chain(slow, np.full(30, a, np.int32))]
    began_s = time.thread_time()
    found = batch.traverse(chains)
    assert time.thread_time() - began_s < 2.0
    assert found.late == (1,)
    assert (found.kinds[:6] == MASKED).all()
    assert (found.kinds[6:] == DEAD).all()
    assert (found.bitmask[6:] == -1).all()
    assert (slow.tokens, slow.generation) == (60, 1)
    assert slow.advance([a]) == (1, False)


@contextmanager
def competitors() -> Iterator[None]:
    """Three busy processes a processor, so that a thread is pushed aside for tens of milliseconds."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(3 * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


@pytest.mark.alone
def test_who_is_pushed_aside_is_not_late_and_who_is_slow_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Time on the clock passes the budget again and again; the processor's share of a chain doesn't."""
    a = vocabulary().tokens.index(b"a")
    innocents = [matcher('root ::= "a"*') for _ in range(8)]
    slow = matcher('root ::= root root | "a" | ""', *[a] * 60)
    budget_s = 0.002
    batch = MatcherBatch(WIDTH, [STOP], 80, budget_s)
    chains = [Chain(one, np.full(6, a, np.int32)) for one in innocents]
    monkeypatch.setattr(matchers, "PATIENCE", PATIENT)
    longest_s = 0.0
    with competitors():
        ends_s = time.monotonic() + 60.0
        while longest_s < 2 * budget_s and time.monotonic() < ends_s:
            for chain in chains:
                began_s = time.perf_counter()
                found = batch.traverse([chain])
                longest_s = max(longest_s, time.perf_counter() - began_s)
                assert (found.late, found.failed) == ((), ())
                assert (found.kinds == MASKED).all()
        found = batch.traverse([*chains[:4], Chain(slow, np.full(30, a, np.int32)), *chains[4:]])
    assert longest_s >= 2 * budget_s
    assert found.late == (4,)
    assert (found.kinds == DEAD).sum() == 30


def test_chains_and_memory_of_another_form_are_refused() -> None:
    one = matcher('root ::= "a"*')
    batch = MatcherBatch(WIDTH, [STOP], 8)
    good = Chain(one, np.zeros(4, np.int32))
    for chains, out, text in [
        ([good, good, good], None, "12 rows"),
        ([Chain(one, np.zeros(0, np.int32))], None, "shape"),
        ([Chain(one, np.zeros(4, np.int32), root=5)], None, "root"),
        ([good], np.zeros((8, 255), np.int32), "256"),
        ([good], np.zeros((8, 256), np.int64), "int64"),
        ([good], np.zeros((256, 8), np.int32).T, "contiguous"),
    ]:
        with pytest.raises(ShapeMismatch, match=text):
            batch.traverse(chains, out)
    with pytest.raises(ShapeMismatch):
        MatcherBatch(WIDTH, [STOP], 100).traverse([Chain(one, np.zeros(65, np.int32))])
    assert batch.traverse([]).kinds.size == 0


def test_an_empty_language_is_refused() -> None:
    with pytest.raises(GrammarRefused, match="no text satisfies it"):
        compiler().compile(GrammarKey("ebnf", "root ::= root"))
