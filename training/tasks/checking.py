"""Judges a reply's text against its example. Standard library only."""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engine.model.dsml import Reply, parse_reply
from engine.model.encoding import Encoding, load_encoding
from training.tasks.example import Example

NANO = Path(__file__).parents[2] / "engine" / "assets" / "nano"
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_EQUATION = re.compile(r"^(?P<left>[-+*/(). \d]+)=\s*(?P<right>-?[\d.]+)$")
_FENCE = re.compile(r"\A```(?:\w+)?\n(.*)\n```\Z", re.DOTALL)
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@cache
def nano_encoding() -> Encoding:
    """The chat format of the shipped model."""
    return load_encoding(NANO)


def answer_text(example: Example) -> str:
    """The wanted reply as the model writes it, EOS included."""
    segments = nano_encoding().answer_segments(example.answer, thinking=example.thinking)
    return "".join(text for text, _ in segments)


def check(example: Example, text: str) -> bool:
    """Whether `text`, all that the model wrote after the prompt, with or without EOS, is right."""
    reply = parse_reply(text, nano_encoding().strings, thinking=example.thinking)
    if example.checker != "calls" and (reply.calls or reply.dropped):
        return False
    return CHECKERS[example.checker](reply, example.expected)


def same_json(left: Any, right: Any) -> bool:
    """Equality as JSON values: true is not 1, key order is free."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right) and isinstance(left, (int, float)) == isinstance(right, (int, float))


def _json(reply: Reply, expected: Any) -> bool:
    try:
        return same_json(json.loads(reply.content), expected)
    except (ValueError, RecursionError):
        return False


def _fenced_json(reply: Reply, expected: Any) -> bool:
    match = _FENCE.match(reply.content.strip())
    return match is not None and _json(Reply(content=match.group(1)), expected)


def _json_text(reply: Reply, expected: str) -> bool:
    """JSON in exactly the wanted layout."""
    return reply.content == expected


def _text(reply: Reply, expected: str) -> bool:
    return reply.content.strip() == expected.strip()


def _one_of(reply: Reply, expected: list[str]) -> bool:
    return _plain(reply.content) in map(_plain, expected)


def _plain(text: str) -> str:
    return text.strip().rstrip(".").lower()


def _contains(reply: Reply, expected: list[str]) -> bool:
    return all(text in reply.content for text in expected)


def _number(reply: Reply, expected: float) -> bool:
    """The last number is the result, and each line of the reasoning that is an equation is true."""
    numbers = _NUMBER.findall(reply.content)
    if not numbers or abs(float(numbers[-1].replace(",", "")) - expected) > 1e-9:
        return False
    return all(_is_true(line) for line in reply.reasoning.splitlines())


def _worked(reply: Reply, expected: str) -> bool:
    """The text is right, and each equation of the reasoning is true."""
    return _text(reply, expected) and all(_is_true(line) for line in reply.reasoning.splitlines())


def _is_true(line: str) -> bool:
    match = _EQUATION.match(line.strip())
    if match is None:
        return True
    try:
        left = _value(ast.parse(match["left"].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False
    return abs(left - float(match["right"])) < 1e-6


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return float(_OPERATIONS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError("not arithmetic")


def _calls(reply: Reply, expected: list[tuple[str, dict[str, Any]]]) -> bool:
    """Exactly these calls in this order; the order of arguments is free."""
    found = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    if reply.dropped or len(found) != len(expected):
        return False
    return all(a[0] == b[0] and same_json(a[1], b[1]) for a, b in zip(found, expected, strict=True))


def _f1(reply: Reply, expected: str) -> bool:
    """Token F1 with the entry of at least one half."""
    said, wanted = (Counter(re.findall(r"\w+", text.lower())) for text in (reply.content, expected))
    common = sum((said & wanted).values())
    return 2 * common >= 0.5 * (sum(said.values()) + sum(wanted.values())) and common > 0


def _rule(reply: Reply, expected: dict[str, Any]) -> bool:
    """Rules of form, all of which hold; `is_text` compares the content without its required ending."""
    text = reply.content.strip()
    if "max_words" in expected and not 0 < len(text.split()) <= expected["max_words"]:
        return False
    if expected.get("upper") and (text != text.upper() or not any(c.isalpha() for c in text)):
        return False
    if "ends" in expected and not text.endswith(expected["ends"]):
        return False
    if "contains" in expected and not all(part.lower() in text.lower() for part in expected["contains"]):
        return False
    return "lines" not in expected or len(text.splitlines()) == expected["lines"]


CHECKERS: dict[str, Callable[[Reply, Any], bool]] = {
    "json": _json,
    "fenced_json": _fenced_json,
    "json_text": _json_text,
    "text": _text,
    "one_of": _one_of,
    "contains": _contains,
    "number": _number,
    "worked": _worked,
    "calls": _calls,
    "f1": _f1,
    "rule": _rule,
}
