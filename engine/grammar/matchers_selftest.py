"""Whether the installed grammar library does what this engine relies on: run before a rank takes requests.

A fraction of a second. Each part compares the library with single calls of its own, or with what must follow
from the vocabulary; a difference fails the start with its name, instead of giving wrong masks later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, GrammarFailed, GrammarRefused, ShapeMismatch
from engine.grammar.compiler import Compiler, compiled_of, deflated, inflated
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import DEAD, ENDED, FREE, MASKED, Chain, Matcher, MatcherBatch
from engine.grammar.tokenizer_info import Vocabulary

QUOTED = GrammarKey("ebnf", r'root ::= "\"" [^"\\]* "\""')
"""A free string in quotes: most tokens are allowed inside it, so that what must not be shows."""

ROWS = 6


def self_test(compiler: Compiler) -> None:
    """All parts. Raises ConfigError naming the first one that fails."""
    handle = compiler.compile(QUOTED)
    for name, holds in _parts(compiler, handle):
        if not holds:
            version = compiler.vocabulary.digest[:16]
            raise ConfigError(f"the grammar library fails the self-test '{name}' (vocabulary {version})")


def _parts(compiler: Compiler, handle: Any) -> Iterator[tuple[str, bool]]:
    words = compiler.vocabulary
    yield "control tokens are no text", _controls_are_no_text(words, handle)
    yield "an empty language is refused", _refuses(compiler, GrammarKey("ebnf", "root ::= root"))
    text = compiler.serialize(handle)
    packed = deflated(text)
    size = len(text.encode())
    loaded = compiler.deserialize(inflated(packed, size))
    yield (
        "a loaded grammar has the masks of the compiled one",
        compiler.probe(loaded) == compiler.probe(handle),
    )
    yield "an altered serial form is refused", _is_refused(packed[:-1] + bytes([packed[-1] ^ 1]), size)
    other = compiler.compile(GrammarKey("ebnf", r'root ::= "\"" [a-z]* "\""'))
    yield "other grammars have other probes", compiler.probe(other) != compiler.probe(handle)
    yield "chains have the masks of single calls", chains_agree(words, handle)
    yield "strided memory is refused", _refuses_strides(words, handle)


def chains_agree(words: Vocabulary, handle: Any) -> bool:
    """Chains that are legal, that break, that end, and an ended one, batched and by single calls."""
    quote = words.tokens.index(b'"')
    plain = [token for token, data in enumerate(words.tokens) if data.isalpha()][: ROWS - 2]
    stop = words.stop_ids[0]
    tails = [
        plain,
        [*plain[:2], -1, *plain[:2]],
        [*plain[:2], words.size, plain[0]],
        [*plain[:1], quote, stop, *plain[:2]],
        [quote, plain[0], stop],
        [plain[0]],
        [],
    ]
    chains = []
    for tail in tails:
        matcher = Matcher(compiled_of(handle), words.size)
        matcher.advance([quote])
        chains.append(Chain(matcher, np.array([quote, *tail], np.int32)))
    free = Matcher(compiled_of(handle), words.size)
    free.advance([quote])
    chains.append(Chain(free, np.array([stop, plain[0], quote, *plain[:2]], np.int32), root=2))
    over = Matcher(compiled_of(handle), words.size)
    over.advance([quote, quote, stop])
    chains.append(Chain(over, np.array([stop, plain[0]], np.int32)))
    rows = sum(len(chain.ids) for chain in chains)
    batch = MatcherBatch(words.size, words.stop_ids, rows, budget_s=10.0)
    # Whatever is written nowhere must not be what the buffer had before.
    out = np.full((rows, batch.words), 0x55555555, np.int32)
    found = batch.traverse(chains, out)
    expected = [one_by_one(chain, words) for chain in chains]
    masks, kinds = (np.concatenate(columns) for columns in zip(*expected, strict=True))
    again = batch.traverse(chains, np.zeros_like(out))
    return bool(
        (found.bitmask == masks).all()
        and (found.kinds == kinds).all()
        and (again.bitmask == masks).all()
        and not found.late
        and not found.failed
    )


def one_by_one(chain: Chain, words: Vocabulary) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Masks and kinds of a chain by filling, accepting and rolling back, which the traversal must equal."""
    handle = chain.matcher.handle
    masks = np.full((len(chain.ids), -(-words.size // 32)), -1, np.int32)
    kinds = np.full(len(chain.ids), DEAD, np.uint8)
    kinds[: chain.root] = FREE
    accepted = 0
    for row in range(chain.root, len(chain.ids)):
        if row > chain.root:
            token = int(chain.ids[row])
            # The library refuses an id outside the vocabulary, too, but writes a line of its own to stderr.
            if not 0 <= token < words.size or not handle.accept_token(token, False):
                break
            accepted += 1
        if handle.is_terminated():
            kinds[row] = ENDED
            break
        handle.fill_next_token_bitmask(masks, row, False)
        kinds[row] = MASKED
    handle.rollback(accepted)
    return masks, kinds


def _controls_are_no_text(words: Vocabulary, handle: Any) -> bool:
    """Inside a string no blank token and no stop token is allowed; behind it, the stop tokens alone are."""
    quote = words.tokens.index(b'"')
    matcher = Matcher(compiled_of(handle), words.size)
    matcher.advance([quote])
    inside = _allowed(matcher, words)
    matcher.advance([quote])
    behind = _allowed(matcher, words)
    blank = [token for token, data in enumerate(words.tokens) if not data]
    return not inside[[*blank, *words.stop_ids]].any() and np.flatnonzero(behind).tolist() == [
        *words.stop_ids
    ]


def _allowed(matcher: Matcher, words: Vocabulary) -> NDArray[np.uint8]:
    mask = np.zeros((1, -(-words.size // 32)), np.int32)
    matcher.handle.fill_next_token_bitmask(mask, 0, False)
    return np.unpackbits(mask.view(np.uint8).reshape(-1), bitorder="little")[: words.size]


def _refuses(compiler: Compiler, key: GrammarKey) -> bool:
    try:
        compiler.compile(key)
    except GrammarRefused:
        return True
    return False


def _is_refused(payload: bytes, raw_bytes: int) -> bool:
    try:
        inflated(payload, raw_bytes)
    except GrammarFailed:
        return True
    return False


def _refuses_strides(words: Vocabulary, handle: Any) -> bool:
    """The library reads a view as if it were whole; so the wrapper must not let one through."""
    batch = MatcherBatch(words.size, words.stop_ids, 4)
    chain = Chain(Matcher(compiled_of(handle), words.size), np.zeros(2, np.int32))
    try:
        batch.traverse([chain], np.zeros((4, 2 * batch.words), np.int32)[:, ::2])
    except ShapeMismatch:
        return True
    return False
