"""Patterns, numbers, choices and clients' own grammars, against Python's `re` and exact fractions."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest
import xgrammar as xgr

from engine.grammar.gate import GrammarRefused, numbers
from engine.grammar.gate.alternatives import texts_with
from engine.grammar.gate.ebnf import ebnf_grammar
from engine.grammar.gate.pattern import parse
from engine.grammar.gate.texts import choice_grammar, regex_grammar
from tests.grammar.gate.oracle import accepts, compiled

PATTERNS = [
    "a|b",
    "^a|b$",
    "^[a-c]+$",
    "",
    "^$",
    "(^a|b)+c$",
    "\\d{2,4}-x?",
    "[^\\s]",
    "^(ab|cd)*$",
    "a.c",
    "^(a+)+b$",
    "(a*)*x",
    "^(?:a|ab)(?:c|bcd)(d*)$",
    "[\\w-]+@",
    "^.{2,3}$",
    "^[a-]{1,}[^a-c]?$",
    "a*$|^$",
    "x{0,2}|a",
    "^(a?b?){0,3}$|^-",
    "^(?!ab)[a-c]+",
    "^(?=.*\\d)(?!.*x$)(?!1|2-)[a-dx12]{2,}$",
    "^(?=a|b$).",
]


def texts(seed: int, count: int = 300) -> list[str]:
    chooser = random.Random(seed)
    return ["".join(chooser.choice("abcdx12- @") for _ in range(chooser.randint(0, 7))) for _ in range(count)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_found_where_python_finds_them(pattern: str) -> None:
    dfa = texts_with(parse(pattern))
    for text in texts(len(pattern)):
        assert dfa.accepts(text) == bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "lengths"),
    [
        ("^$", (0, 0)),
        ("^(a|bc)(d?|e{3})$", (1, 5)),
        ("^a+$", (1, None)),
        ("b", (1, None)),
        ("^[^\\s\\S]$", (0, 0)),
    ],
)
def test_lengths_are_those_of_the_shortest_and_the_longest_text(
    pattern: str, lengths: tuple[int, int | None]
) -> None:
    assert texts_with(parse(pattern)).lengths() == lengths


@pytest.mark.parametrize("pattern", [one for one in PATTERNS if one and one != "^$"])
def test_a_regex_matches_whole_texts(pattern: str) -> None:
    grammar = compiled(regex_grammar(pattern))
    for text in texts(len(pattern), 150):
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "a lookahead"),
        ("^b(?=a)", "a lookahead"),
        ("^(?!a)b|c", "one of several alternatives"),
        ("^(?:(?!a)b)", "a negative lookahead"),
        ("^(?=(?!a)b)", "a negative lookahead"),
        ("^(?!a)*b", "a repeated"),
        ("(?<!a)b", "a negative lookbehind"),
        ("(a)\\1", "a backreference"),
        ("\\bword", "a word boundary"),
        ("\\p{L}", "a Unicode property"),
        ("(?i)a", "inline flags"),
        ("a++", "possessive"),
        ("a{3,2}", "repetition"),
        ("a{1,100000}", "repetition"),
        ("*a", "without an item"),
        ("(a", "unclosed"),
        ("a)", "unbalanced"),
        ("[b-a]", "a range"),
        ("a" * 2000, "longer"),
        ("(" * 50 + "a" + ")" * 50, "nesting"),
        ("(^|x)(a|b)*a(a|b){12}", "states"),
        ("[^\\s\\S]", "no text"),
        ("", "empty"),
    ],
)
def test_a_pattern_is_refused_by_the_name_of_its_construct(pattern: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=why):
        regex_grammar(pattern)


LIMITS = ["0", "3", "-3", "1.1", "-0.5", "100", "-99.95", "0.005", "2000.10"]


def spelt_numbers() -> list[str]:
    chooser = random.Random(5)
    found = []
    for _ in range(250):
        whole = chooser.choice(["0", str(chooser.randint(1, 9)), str(chooser.randint(10, 3000))])
        places = "".join(chooser.choice("00123459") for _ in range(chooser.randint(1, 4)))
        found.append(chooser.choice(["", "-"]) + whole + chooser.choice(["", "." + places]))
    return found


@pytest.mark.parametrize("limit", LIMITS)
def test_bounds_are_exact(limit: str) -> None:
    value = Fraction(limit)
    both = (False, True)
    conditions = [make(value, strict=s) for make in (numbers.at_least, numbers.at_most) for s in both]
    for condition in (*conditions, numbers.equal_to(value)):
        for wanted in both:
            dfa = numbers.spellings(((condition, wanted),))
            for text in spelt_numbers():
                assert dfa.accepts(text) == (condition.holds(Fraction(text)) == wanted), text


@pytest.mark.parametrize("divisor", ["0.01", "2.5", "0.0075", "0.5"])
def test_multiples_are_exact(divisor: str) -> None:
    condition = numbers.multiple_of(Fraction(divisor))
    for wanted in (False, True):
        dfa = numbers.spellings(((condition, wanted),))
        for text in spelt_numbers():
            assert dfa.accepts(text) == (condition.holds(Fraction(text)) == wanted), text


def test_a_number_under_a_condition_has_the_digits_of_a_double() -> None:
    dfa = numbers.spellings(((numbers.INTEGER, False),))
    assert dfa.accepts("1234567890.12345")
    assert not dfa.accepts("1234567890.123456")


def test_choices_are_texts_letter_by_letter() -> None:
    choices = ['a"b', "c\\d", "é\n", "|", "[x]*", "a"]
    grammar = compiled(choice_grammar(choices))
    assert all(accepts(grammar, one) for one in choices)
    assert not any(accepts(grammar, one) for one in ("", "x", 'a"', "b", "\\u0061"))


@pytest.mark.parametrize("choices", [[], ["a", ""], ["a", 1], "ab", {"a": 1}, ["a\0"], ["x"] * 6000])
def test_choices_that_are_none_are_refused(choices: object) -> None:
    with pytest.raises(GrammarRefused):
        choice_grammar(choices)


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('root ::= "a"* b # comment\nb ::= "x" | "y"', "aax", "aa"),
        ('root ::= "(" root? ")"', "(())", "(()"),
        ("root ::= [a-c]{2,3} [^a-c]", "abx", "ax"),
        ('root ::= ([a-z]+ "\\n")*', "ab\nc\n", "ab"),
        ('root ::= (("a" | "b") ("," ("a" | "b"))*)?', "a,b", "a,"),
        ('root ::= "\\u0041\\n"', "A\n", "A"),
        ('root ::= () [a-c-e\\]]{ 1 , 2 } "\\x2d"', "-]-", "d-"),
    ],
)
def test_grammars_of_clients_are_passed_on_as_they_are(grammar: str, yes: str, no: str) -> None:
    key = ebnf_grammar(grammar)
    assert key.text.replace("\\ud800-\\udfff", "") == grammar
    assert accepts(compiled(key), yes)
    assert not accepts(compiled(key), no)


def test_a_class_of_a_client_lets_no_half_of_a_pair_through() -> None:
    for text in ('root ::= [^"]', "root ::= [a-\U0001f600] [\\u00e9-\\uffff]"):
        matcher = xgr.GrammarMatcher(compiled(ebnf_grammar(text)))
        assert matcher.accept_token(0xED)
        assert not matcher.accept_token(0xA0)
    grammar = compiled(ebnf_grammar("root ::= [xa-\U0001f600-] [\\u00e9-\\uffff]"))
    assert all(accepts(grammar, text) for text in ("aé", "-\uffff", "\ud7ff\ue000", "😀中"))
    assert not accepts(grammar, "Aé")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('a ::= "x"', "no rule named root"),
        ("root ::= b", "not defined"),
        ("root ::= root", "never ends"),
        ('root ::= root root | "a" | ""', "begins with itself"),
        ('root ::= b\nb ::= "" root "x" | "y"', "begins with itself"),
        ('root ::= ("a"*)*', "endless"),
        ('root ::= ("a"? "b"+)+', "endless"),
        ('root ::= item*\nitem ::= "a" | words\nwords ::= [a-z]+', "endless"),
        ('root ::= "a"{2,1}', "repetition"),
        ('root ::= "a"{1,99999}', "repetition"),
        ("root ::= Token(5)", "Token is not supported"),
        ('root ::= TagDispatch(("a", root))', "TagDispatch is not supported"),
        ('root ::= "a" (= "b")', "lookahead"),
        ('root[max_tokens=3] ::= "a"', "attributes"),
        ('root ::= "a', "not understood"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\x41B"', "escape"),
        ('root ::= "\\-"', "escape"),
        ("root ::= [\\d]", "escape"),
        ("root ::= [\\ud800a]", "no character"),
        ('root ::= "\\U00110000"', "no character"),
        ("root ::= [c-a]", "range"),
        ("root ::= [^\\u0063-\\x61]", "range"),
        ('root ::= "a" | | "b"', "an empty alternative"),
        ('root ::= ("a" |)', "an empty alternative"),
        ('root ::= \na ::= "a"', "an empty alternative"),
        ('root ::= "a"{2}{3}', "one after another"),
        ('root ::= "a"+?', "one after another"),
        ('root ::= r r ::= "a"', "beginning of a line"),
        ("root ::= [\\u0061-\\u00063x]", "range"),
        ('root ::= true\ntrue ::= "a"', "no name"),
        ('root ::= "a"{\u0661}', "not understood"),
        ('root ::= "\\u0000"', "NUL"),
        ("root ::= []", "empty class"),
        ('root ::= ("a"', "closed"),
        ('root ::= "a"\nroot ::= "b"', "twice"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nesting"),
        ("root ::= " + " | ".join(['"a"'] * 30_000), "characters|parts"),
        ("", "empty"),
        ('start: "a"', "not understood"),
    ],
)
def test_a_grammar_is_refused_by_what_is_wrong_in_it(grammar: str, why: str) -> None:
    with pytest.raises(GrammarRefused, match=why):
        ebnf_grammar(grammar)
