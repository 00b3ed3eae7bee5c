"""The parts of `bench grammar`: its schemas are bounded as they say, and its checks find what is wrong."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from api.gate import gate_of
from api.served import load_served
from bench import grammar_wait
from bench.grammar_cases import Case, cases
from bench.grammar_figures import Answer, Invalid, Pass, UnequalLengths, check_lengths, fault_of, validity
from engine.config import NANO, Settings
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.gate import GatePolicy, schema_grammar
from engine.messages import LENGTH, STOP_EOS
from tests.grammar.service.stage import STOP, vocabulary


@pytest.fixture(scope="module")
def library() -> Compiler:
    return Compiler(vocabulary(), whole_library())


def walked(library: Compiler, case: Case, draw: random.Random) -> tuple[str, int]:
    """(text, tokens with the end) of a walk that goes where the masks let it, and ends as late as it can."""
    matcher = library.matcher(library.compile(schema_grammar(case.schema)))
    text, tokens = b"", 0
    mask = np.zeros((1, library.words), np.int32)
    while True:
        matcher.fill_next_token_bitmask(mask, 0, False)
        bits = np.unpackbits(mask.view(np.uint8)[0], bitorder="little")[: library.vocabulary.size]
        allowed = np.flatnonzero(bits)
        chosen = int(draw.choice(allowed.tolist()))
        if chosen == STOP and allowed.size > 1:
            continue
        assert matcher.accept_token(chosen, False)
        tokens += 1
        if chosen == STOP:
            return text.decode(), tokens
        text += library.vocabulary.tokens[chosen]


def test_random_walks_end_within_the_bound_and_obey(library: Compiler) -> None:
    draw = random.Random(1)
    for case in cases():
        text, tokens = walked(library, case, draw)
        assert len(text.encode()) <= case.longest, (case, text)
        assert tokens <= case.longest + 1
        assert fault_of(case.schema, text) == "", (case, text)


def test_the_schemas_are_the_same_each_time_and_all_different() -> None:
    assert cases() == cases()
    assert len({schema_grammar(case.schema).digest for case in cases()}) == len(cases()) == 64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON"),
        ('{"a": "x"}', "breaks its schema"),
        ('{"a": 1}', ""),
        ("{}", "breaks its schema"),
    ],
)
def test_an_answer_is_judged_by_parser_and_validator(text: str, fault: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert fault in fault_of(schema, text)
    assert bool(fault) == bool(fault_of(schema, text))


def test_a_whole_answer_that_does_not_obey_fails_the_bench_and_a_cut_one_counts() -> None:
    case = Case(0, {"type": "integer"}, 3)
    asked = [type("Asked", (), {"case": case})()]
    good, cut = Answer("12", 2, STOP_EOS), Answer("1", 1, LENGTH)
    assert validity(asked, [good, cut])["valid_fraction"] == 0.5
    with pytest.raises(Invalid, match="schema 0"):
        validity(asked, [good, Answer('"a"', 3, STOP_EOS)])


def test_passes_of_other_lengths_are_not_compared() -> None:
    bound, free = (Pass([Answer(tokens=count) for count in counts], 1.0) for counts in ((3, 5), (3, 4)))
    check_lengths((bound, bound), [3, 5])
    with pytest.raises(UnequalLengths, match=r"answers of \[3, 4\] tokens stand against lengths of \[3, 5\]"):
        check_lengths((bound, free), [3, 5])


@pytest.mark.anyio
async def test_grammars_that_keep_compilers_busy_are_each_a_new_one(
    library: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They differ in the name of one field."""
    monkeypatch.setattr(grammar_wait, "FIELDS", 3)
    served = load_served(Settings(model_path=str(NANO)), 0)
    known = await grammar_wait.slow(gate_of(GatePolicy(), served.encoding, served.tokenizer))
    found = [known, *islice(grammar_wait.others(known), 3)]
    assert len({one.key.digest for one in found}) == 4
    for number, one in enumerate(found):
        name = f"other_{number - 1}" if number else "field_0"
        matcher = library.matcher(library.compile(one.key))
        assert matcher.accept_string(f'{{"{name}":"a","field_1":"b-22"', False)


def test_gaps_are_compared_by_their_percentiles() -> None:
    calm = grammar_wait.Pass(gaps=[0.01] * 100, waits=[0.0])
    busy = grammar_wait.Pass(gaps=[0.01] * 90 + [0.03] * 10, waits=[0.5, 1.5])
    told = grammar_wait.figures([(busy, calm)] * 3)
    assert (told["ratio"], told["compiling_p50_ms"], told["calm_p99_ms"]) == (3.0, 10.0, 10.0)
    assert (told["compiles"], told["compile_p50_s"], told["compile_max_s"]) == (6, 1.0, 1.5)
