"""The official suite through the whole gate; `python -m tests.grammar.gate.suite` writes the docs' table."""

from __future__ import annotations

import itertools
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import xgrammar as xgr

from engine.grammar.gate import GrammarRefused, schema_grammar
from tests.grammar.gate.oracle import accepts, compiled

DATA = Path(__file__).parent / "data" / "draft2020-12.json.xz"
DOCS = Path(__file__).parents[3] / "docs" / "structured_output.md"
BEGIN, END = "<!-- suite table: generated -->", "<!-- end of the suite table -->"

COLUMNS = ("right", "accepted but invalid", "rejected but valid", "only another key order", "refused")


@cache
def outcomes(open_objects: bool) -> tuple[tuple[str, str, str], ...]:
    """(keyword, test, outcome) of every test, the outcome out of COLUMNS; computed once."""
    return tuple(_outcomes(open_objects))


def _outcomes(open_objects: bool) -> Iterator[tuple[str, str, str]]:
    suite = json.loads(lzma.decompress(DATA.read_bytes()))
    for keyword, groups in suite.items():
        for group in groups:
            grammar = _grammar(group["schema"], open_objects=open_objects)
            for test in group["tests"]:
                name = f"{group['description']}: {test['description']}"
                yield keyword, name, _outcome(grammar, test["data"], valid=test["valid"])


def _grammar(schema: Any, *, open_objects: bool) -> xgr.CompiledGrammar | None:
    try:
        return compiled(schema_grammar(schema, open_objects=open_objects))
    except GrammarRefused:
        return None


def _outcome(grammar: xgr.CompiledGrammar | None, data: Any, *, valid: bool) -> str:
    if grammar is None:
        return "refused"
    first = accepts(grammar, json.dumps(data, ensure_ascii=False))
    anyhow = first or any(accepts(grammar, text) for text in _orders(data))
    if not valid:
        return "accepted but invalid" if anyhow else "right"
    return "right" if first else "only another key order" if anyhow else "rejected but valid"


def _orders(data: Any) -> Iterator[str]:
    """An object of up to four members in every order of its keys."""
    if isinstance(data, dict) and len(data) <= 4:
        for members in itertools.permutations(data.items()):
            yield json.dumps(dict(members), ensure_ascii=False)


def table() -> str:
    """The Markdown table: by keyword with objects as the standard has them, then with the gate's default."""
    by_keyword: dict[str, Counter[str]] = {}
    for keyword, _, outcome in outcomes(True):
        by_keyword.setdefault(keyword, Counter())[outcome] += 1
    total = sum(by_keyword.values(), Counter())
    closed = Counter(outcome for _, _, outcome in outcomes(False))
    head = [f"| keyword | tests | {' | '.join(COLUMNS)} |", f"| --- | {' | '.join(['--:'] * 6)} |"]
    rows = [_row(keyword, counts) for keyword, counts in sorted(by_keyword.items())]
    return "\n".join([*head, *rows, _row("**all**", total), _row("all, closed by default", closed)])


def _row(name: str, counts: Counter[str]) -> str:
    cells = [str(sum(counts.values())), *(str(counts[column] or "") for column in COLUMNS)]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Put the table between its marks."""
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCS.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
