"""What a compiled grammar really allows: byte by byte, by random walks, and judged by another validator."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import jsonschema
import numpy as np
import xgrammar as xgr

from engine.grammar.key import GrammarKey

STOP = 256
LIKELY = frozenset(b'abcx019-."{}[],: /tfn')
CLOSING = frozenset(b'"}]')


@lru_cache(maxsize=1)
def compiler() -> xgr.GrammarCompiler:
    """A compiler for a vocabulary of the 256 bytes and one stop token: its masks are exact and quick."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"<stop>"]
    info = xgr.TokenizerInfo(vocabulary, xgr.VocabType.RAW, vocab_size=257, stop_token_ids=[STOP])
    return xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def compiled(key: GrammarKey) -> xgr.CompiledGrammar:
    """The grammar of a key."""
    if key.syntax == "structural_tag":
        return compiler().compile_structural_tag(json.loads(key.text))
    return compiler().compile_grammar(key.text)


def accepts(grammar: xgr.CompiledGrammar, text: str) -> bool:
    """Whether the whole text is in the language."""
    matcher = xgr.GrammarMatcher(grammar)
    return bool(matcher.accept_string(text)) and bool(matcher.is_completed())


def walk(grammar: xgr.CompiledGrammar, seed: int, soft_limit: int = 120) -> str | None:
    """A random text that the grammar allows; None for one that grew too long. A dead end is an error."""
    chooser = random.Random(seed)
    matcher = xgr.GrammarMatcher(grammar)
    mask = xgr.allocate_token_bitmask(1, 257)
    written = bytearray()
    while len(written) < 4 * soft_limit:
        matcher.fill_next_token_bitmask(mask, 0)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:257]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"a dead end after {bytes(written)!r}"
        if STOP in allowed and (len(allowed) == 1 or chooser.random() < 0.4):
            return written.decode()
        likely = [byte for byte in allowed if byte in LIKELY]
        closing = [byte for byte in allowed if byte in CLOSING] if len(written) > soft_limit else []
        pool = closing or (likely if likely and chooser.random() < 0.9 else allowed)
        byte = chooser.choice([one for one in pool if one != STOP] or allowed)
        if byte == STOP:
            return written.decode()
        assert matcher.accept_token(byte)
        written.append(byte)
    return None


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    """The independent judge."""
    return jsonschema.Draft202012Validator(schema)
