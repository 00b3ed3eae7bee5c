"""The way over the disk changes no mask: what is read back allows what the compiled grammar allows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.grammar_cases import cases
from engine.grammar import worker_job
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.gate import schema_grammar
from engine.grammar.key import GrammarKey
from tests.grammar.service.stage import strings, vocabulary, word
from tests.grammar.service.test_matchers import allowed, walk
from tests.grammar.service.test_stored import compiler, job, serial_forms_pay


def test_grammars_from_the_disk_have_the_masks_of_compiled_ones_along_random_legal_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries with the serial form, and a marker, against a compiler that has seen none of them."""
    serial_forms_pay(monkeypatch)
    keys = [strings("a"), schema_grammar(cases()[3].schema), schema_grammar(cases()[40].schema)]
    keys.append(GrammarKey("ebnf", 'root ::= item ("," item)*\nitem ::= "[" item? "]" | "né" | [0-9]{1,3}'))
    for key in keys:
        job(tmp_path, key)
    monkeypatch.setattr(worker_job, "LOAD_SHARE", 0.0)
    job(tmp_path, word("marked"))
    fresh, chance = Compiler(vocabulary(), whole_library()), random.Random(7)
    for key in (*keys, word("marked")):
        outcome, _ = job(tmp_path, key)
        assert outcome.artifact is not None
        assert outcome.source == ("local_compile_marker" if key == word("marked") else "disk")
        loaded, handle = compiler().load(outcome.artifact), fresh.compile(key)
        for _ in range(6):
            one, other = fresh.matcher(handle), compiler().matcher(loaded)
            for token in walk(one, chance, 30):
                assert allowed(one) == allowed(other)
                assert one.accept_token(token, False)
                assert other.accept_token(token, False)
            assert one.is_terminated() == other.is_terminated()
