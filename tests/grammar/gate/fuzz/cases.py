"""One case of the fuzz: something that is nearly right goes through gate and compiler, and texts are judged.

What the gate accepts must compile, and its texts must be exactly those of an independent reading. Whatever is
wrong raises `Found`; a crash or a hang is for the process around this to notice.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import xgrammar as xgr

from engine.grammar.gate import GrammarRefused, parse_request, schema_grammar
from engine.grammar.key import GrammarKey
from tests.grammar.gate.fuzz.grammars import PIECES as GRAMMAR_PIECES
from tests.grammar.gate.fuzz.grammars import GrammarMaker
from tests.grammar.gate.fuzz.patterns import PIECES as PATTERN_PIECES
from tests.grammar.gate.fuzz.patterns import Ecma, PatternMaker, Undecided
from tests.grammar.gate.fuzz.reading import read
from tests.grammar.gate.fuzz.tags import TagMaker, changed, tag_reader
from tests.grammar.gate.fuzz.texts import LONGEST, mutated, short_texts
from tests.grammar.gate.oracle import accepts, compiled, validator, walk
from tests.grammar.gate.schemas import SchemaMaker

Say = Callable[[str], None]
"""Told which part begins: gate, compile, match or judge."""

WALKS = 6
TEXTS = 30


class Found(AssertionError):
    """Something that must not be: accepted and not enforced, or refused without a reason."""


def gated(fields: dict[str, object], say: Say) -> GrammarKey | None:
    """The key; None where the gate refuses, with its reason."""
    say("gate")
    try:
        key = parse_request(fields)
    except GrammarRefused as refusal:
        if not refusal.why or not refusal.param:
            raise Found(f"{fields} is refused without a reason: {refusal}") from None
        return None
    if key is None:
        raise Found(f"{fields} is no wish")
    return key


def built(key: GrammarKey, given: object, say: Say) -> xgr.CompiledGrammar:
    """The compiled grammar of what the gate accepted."""
    say("compile")
    try:
        return compiled(key)
    except RuntimeError as error:
        raise Found(f"accepted, and not compiled: {given!r}: {str(error)[-300:]}") from error


def written(grammar: xgr.CompiledGrammar, chance: random.Random, say: Say) -> list[str]:
    """Texts that the grammar allows, by random walks."""
    say("match")
    found = [walk(grammar, chance.randrange(1 << 30), LONGEST) for _ in range(WALKS)]
    return [text for text in found if text is not None]


def judged(
    grammar: xgr.CompiledGrammar, texts: list[str], holds: Callable[[str], bool], given: object, say: Say
) -> Counter[str]:
    """Compares grammar and judge text by text."""
    counts: Counter[str] = Counter()
    for text in texts:
        say("judge")
        try:
            wanted = holds(text)
        except Undecided:
            counts["texts_undecided"] += 1
            continue
        say("match")
        if accepts(grammar, text) != wanted:
            raise Found(f"{given!r}: {text!r} is {'held back' if wanted else 'let through'}")
        counts["texts"] += 1
        counts["texts_allowed"] += wanted
    return counts


def writable(texts: list[str]) -> list[str]:
    """Without those with characters that no grammar has: NUL, and halves of pairs."""
    return [text for text in texts if not any(one == "\0" or "\ud800" <= one <= "\udfff" for one in text)]


def pattern_case(seed: int, say: Say) -> Counter[str]:
    """A regular expression for the whole text, and the same for a JSON string that it is found in."""
    chance = random.Random(seed)
    pattern = PatternMaker(chance).pattern()
    whole = chance.random() < 0.3
    if not whole:
        pattern = mutated(pattern, chance, PATTERN_PIECES)
    key = gated({"regex": pattern}, say)
    if key is None:
        return Counter(refused=1, valid_refused=whole)
    grammar = built(key, pattern, say)
    texts = written(grammar, chance, say)
    try:
        judge = Ecma(pattern)
    except Undecided:
        return Counter(undecided=1)
    except ValueError as error:
        raise Found(f"{pattern!r} is accepted, and no regular expression: {error}") from error
    texts = writable(texts + short_texts(chance, texts, TEXTS))
    return (
        Counter(checked=1)
        + judged(grammar, texts, judge.matches, pattern, say)
        + _in_string(pattern, judge, texts, say)
    )


def _in_string(pattern: str, judge: Ecma, texts: list[str], say: Say) -> Counter[str]:
    say("gate")
    try:
        key = schema_grammar({"type": "string", "pattern": pattern})
    except GrammarRefused:
        # Found anywhere needs more states than matched as a whole.
        return Counter(string_refused=1)
    spelt = [json.dumps(text, ensure_ascii=False) for text in texts]
    grammar = built(key, pattern, say)
    return judged(grammar, spelt, lambda text: judge.is_in(json.loads(text)), {"pattern": pattern}, say)


def grammar_case(seed: int, say: Say) -> Counter[str]:
    """A client's grammar."""
    chance = random.Random(seed)
    text = GrammarMaker(chance).grammar()
    whole = chance.random() < 0.3
    if not whole:
        text = mutated(text, chance, GRAMMAR_PIECES)
    key = gated({"ebnf": text}, say)
    if key is None:
        return Counter(refused=1, valid_refused=whole)
    grammar = built(key, text, say)
    texts = written(grammar, chance, say)
    say("judge")
    try:
        judge = read(text)
    except ValueError as error:
        raise Found(f"{text!r} is accepted, and no grammar: {error}") from error
    texts = writable(texts + short_texts(chance, texts, TEXTS))
    return Counter(checked=1) + judged(grammar, texts, judge, text, say)


def tag_case(seed: int, say: Say) -> Counter[str]:
    """A structural tag."""
    chance = random.Random(seed)
    tag = TagMaker(chance).tag()
    whole = chance.random() < 0.3
    if not whole:
        tag = changed(tag, chance)
    key = gated({"structural_tag": tag}, say)
    if key is None:
        return Counter(refused=1, valid_refused=whole)
    try:
        grammar = built(key, tag, say)
    except Found as found:
        # What only the compiler knows of tags it says by name; a client gets that as a refusal.
        if "Invalid structural tag error" in str(found):
            return Counter(refused=1, refused_by_compiler=1)
        raise
    say("judge")
    try:
        judge = tag_reader(tag)
    except Undecided:
        with suppress(UnicodeDecodeError):  # Free text is any bytes.
            written(grammar, chance, say)
        return Counter(undecided=1)
    texts = written(grammar, chance, say)
    texts = writable(texts + short_texts(chance, texts, TEXTS))
    return Counter(checked=1) + judged(grammar, texts, judge, tag, say)


def schema_case(seed: int, say: Say) -> Counter[str]:
    """A JSON schema full of keywords that meet each other: what its grammar writes is valid.

    It may hold back what is valid, too, as the documentation says.
    """
    schema, chance = SchemaMaker(seed).schema(), random.Random(seed)
    say("gate")
    try:
        key = schema_grammar(
            schema,
            open_objects=chance.random() < 0.5,
            whitespace=chance.choice(("none", "compact", "flexible")),
        )
    except GrammarRefused as refusal:
        if not refusal.why:
            raise Found(f"{schema} is refused without a reason") from None
        return Counter(refused=1)
    grammar = built(key, schema, say)
    say("match")
    texts = [walk(grammar, chance.randrange(1 << 30)) for _ in range(WALKS)]
    say("judge")
    judge = validator(schema)
    found = Counter(checked=1)
    for text in texts:
        if text is not None:
            errors = [error.message for error in judge.iter_errors(json.loads(text))]
            if errors:
                raise Found(f"{schema}: {text!r} is let through: {errors}")
            found["texts"] += 1
    return found


CASES: dict[str, Callable[[int, Say], Counter[str]]] = {
    "json_schema": schema_case,
    "regex": pattern_case,
    "ebnf": grammar_case,
    "structural_tag": tag_case,
}
"""Kind -> its case, by a seed. Returns counts: refused or checked, texts and what became of them."""
