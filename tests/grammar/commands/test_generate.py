"""`python -m engine generate` with a form: through the same gate and service as requests over HTTP."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from api.gate import AFTER_THINK, START
from engine.__main__ import main, parser_for
from engine.commands.generate import DONE, REFUSED, wish_of
from engine.errors import ConfigError
from engine.grammar.gate import GatePolicy, GrammarRefused, parse_request

POLICY = GatePolicy(whitespace="none")
SCHEMA = '{"type": "number", "multipleOf": 0.10}'
FORMAT = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {SCHEMA}}}}}'
EBNF = 'root ::= "yes" | "no"'
TAG = '{"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}'


def parsed(*flags: str) -> argparse.Namespace:
    return parser_for("generate").parse_args(flags)


@pytest.mark.parametrize(
    ("flag", "value", "field", "wanted"),
    [
        ("--regex", "[a-c]+", "regex", "[a-c]+"),
        ("--ebnf", EBNF, "ebnf", EBNF),
        ("--response-format", "json_object", "response_format", {"type": "json_object"}),
        ("--response-format", SCHEMA, "json_schema", SCHEMA),
        ("--response-format", FORMAT, "json_schema", SCHEMA),
        ("--response-format", TAG, "response_format", json.loads(TAG)),
    ],
)
def test_a_flag_is_the_requests_field(
    flag: str, value: str, field: str, wanted: object, tmp_path: Path
) -> None:
    given = value
    if value[0] == "{":
        given = str(tmp_path / "form.json")
        Path(given).write_text(value)
    wish = wish_of(parsed(flag, given), POLICY)
    assert wish is not None
    assert wish.key == parse_request({field: wanted}, POLICY)
    assert wish.root == START
    thinking = wish_of(parsed(flag, given, "--chat", "--thinking"), POLICY)
    assert thinking is not None
    assert thinking.root == AFTER_THINK


def test_no_flag_is_no_grammar_and_two_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert wish_of(parsed(), POLICY) is None
    with pytest.raises(SystemExit):
        parsed("--regex", "a", "--ebnf", EBNF)
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "can't be read"),
        ('{"type": "string", "$ref": "#/x"}', "json_schema at /\\$ref: "),
        ('{"type": "json_schema"}', "response_format at /json_schema/schema: a schema is missing"),
        ("false", "no value meets this schema"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
    ],
)
def test_a_file_that_is_no_form_is_refused_with_the_gates_words(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "form.json"
    file.write_text(text)
    with pytest.raises((ConfigError, GrammarRefused), match=why):
        wish_of(parsed("--response-format", str(file)), POLICY)


def test_a_refusal_ends_the_command_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "x", "--regex", "(?=a)b"]) == REFUSED
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "generate: regex: a lookahead at character 0 of the pattern is not supported\n"


@pytest.mark.slow
def test_every_output_of_the_command_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--threads", "1", "--max-total-tokens", "4096", "--grammar-cache-dir", "none"]
    asked = ["--prompt", "Say", "--prompt", "No", "--temperature", "1", "--regex", "[a-c]{3}-[0-9]{2}"]
    assert main(["generate", *asked, *flags]) == DONE
    assert re.fullmatch(r"(?:(?:Say|No)\n  -> [a-c]{3}-[0-9]{2}\n){2}", capsys.readouterr().out)
