"""The grammar library: compile, serialize, load, and a probe that compares masks.

The same calls run in compile workers and in ranks. Workers load the library's native part alone: 0.12 s and
43 MB instead of 2.2 s and 272 MB, since the package as a whole imports torch and transformers. The self-test
fails the start where another release has moved what is used here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import types
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, GrammarFailed, GrammarRefused
from engine.grammar.key import GrammarKey
from engine.grammar.tokenizer_info import Vocabulary
from engine.messages import GrammarArtifact

RAW = 0
"""The library's number for a vocabulary of bytes."""

RULE_CACHE_BYTES = 64 << 20
"""Of the library's own cache; a third of it keeps rules that grammars share."""

PROBE_STEPS = 12
TEXT_CHARS = 300


def native_part() -> Any:
    """The library's native calls in a process that never imports torch or the whole package."""
    if "xgrammar" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        found = importlib.util.find_spec("xgrammar")
        if found is None or found.submodule_search_locations is None:
            raise ConfigError("the package xgrammar is not installed")
        package = types.ModuleType("xgrammar")
        package.__path__ = list(found.submodule_search_locations)
        package.__spec__ = found
        sys.modules["xgrammar"] = package
    return _core()


def whole_library() -> Any:
    """The library's native calls in a process that has torch and builds matchers."""
    import xgrammar

    if not hasattr(xgrammar, "GrammarMatcher"):
        raise ConfigError("only the native part of the grammar library is loaded in this process")
    return _core()


def _core() -> Any:
    for name in ("load_binding", "exception"):  # The native calls, and the classes of its errors.
        importlib.import_module(f"xgrammar.{name}")
    return importlib.import_module("xgrammar.base")._core


def library_version() -> str:
    """Release and serial form of the library, and its binary: what serialized grammars depend on."""
    found = importlib.util.find_spec("xgrammar")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(next(iter(found.submodule_search_locations)))
    binary = hashlib.sha256()
    for path in sorted(folder.glob("libxgrammar*")):
        binary.update(path.read_bytes())
    serial = _core().config.get_serialization_version()
    return f"xgrammar {metadata.version('xgrammar')} {serial} {binary.hexdigest()[:16]}"


class Compiler:
    """Compiles for one vocabulary. Calls let other threads run; none of them can be interrupted."""

    def __init__(self, vocabulary: Vocabulary, core: Any) -> None:
        """core  `native_part()` or `whole_library()`."""
        self.vocabulary = vocabulary
        self.words = -(-vocabulary.size // 32)
        self._core = core
        self.info = core.TokenizerInfo(
            list(vocabulary.tokens), RAW, vocabulary.size, list(vocabulary.stop_ids), False
        )
        self._compiler = core.GrammarCompiler(self.info, 1, True, RULE_CACHE_BYTES, False)

    def compile(self, key: GrammarKey) -> Any:
        """The library's handle of the compiled grammar.

        raises  GrammarRefused where the library can't compile it, or no text at all satisfies it
        """
        try:
            if key.syntax == "structural_tag":
                handle = self._compiler.compile_structural_tag(key.text)
            else:
                handle = self._compiler.compile_grammar_from_strings(key.text, "root")
        except RuntimeError as error:
            raise GrammarRefused(f"{key.kind}: {reason_of(error)}") from None
        if not self._first_mask(self.matcher(handle)).any():
            raise GrammarRefused(f"{key.kind}: no text satisfies it")
        return handle

    def matcher(self, handle: Any) -> Any:
        """The library's handle of a matcher at the beginning."""
        return self._core.GrammarMatcher(handle, None, False, -1, None)

    def serialize(self, handle: Any) -> str:
        """The library's serial form."""
        return str(handle.serialize_json())

    def deserialize(self, text: str) -> Any:
        """What `serialize` wrote. The library checks little of it: only authentic bytes may come here."""
        return self._core.CompiledGrammar.deserialize_json(text, self.info)

    def probe(self, handle: Any) -> bytes:
        """SHA-256 of the masks along a walk that they direct themselves: equal grammars, equal probes."""
        digest = hashlib.sha256()
        matcher = self.matcher(handle)
        for step in range(PROBE_STEPS):
            mask = self._first_mask(matcher)
            digest.update(mask.tobytes())
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocabulary.size]
            bits[list(self.vocabulary.stop_ids)] = 0
            choices = np.flatnonzero(bits)
            if not choices.size:
                break
            # Another place in each step, so that the walk leaves the first alternative and free strings.
            chosen = int(choices[(step * 7919) % choices.size])
            if not matcher.accept_token(chosen, False):
                raise GrammarFailed(f"token {chosen} is in the mask and isn't accepted, at step {step}")
        return digest.digest()

    def load(self, artifact: GrammarArtifact) -> Any:
        """The handle of a grammar that a worker has compiled; blocks, for about what its figures say.

        raises  GrammarFailed where it isn't what the worker saw
        """
        if artifact.payload:
            handle = self.deserialize(inflated(artifact.payload, artifact.raw_bytes))
        else:
            handle = self.compile(GrammarKey.from_wire(artifact.key))
        if self.probe(handle) != artifact.probe:
            raise GrammarFailed("a grammar that was loaded gives other masks than the one that was compiled")
        return handle

    def _first_mask(self, matcher: Any) -> NDArray[np.int32]:
        mask = np.zeros((1, self.words), np.int32)
        matcher.fill_next_token_bitmask(mask, 0, False)
        return mask.reshape(-1)


def check(compiler: Compiler) -> None:
    """The little that a compile worker needs of the library. Raises ConfigError where it isn't there.

    A rank's self-test (`matchers_selftest`) asks for much more.
    """
    handle = compiler.compile(GrammarKey("ebnf", 'root ::= "[" [a-z]* "]"'))
    loaded = compiler.deserialize(compiler.serialize(handle))
    other = compiler.compile(GrammarKey("ebnf", 'root ::= "[" [0-9]* "]"'))
    if handle.memory_size_bytes() <= 0 or compiler.probe(loaded) != compiler.probe(handle):
        raise ConfigError(
            "the grammar library doesn't give the masks of a grammar that it has written and read"
        )
    if compiler.probe(other) == compiler.probe(handle):
        raise ConfigError("the grammar library gives equal masks for unequal grammars")


def compiled_of(handle: Any) -> Any:
    """The library's own CompiledGrammar around a handle; for ranks, which have the whole library."""
    from xgrammar import CompiledGrammar

    return CompiledGrammar._create_from_handle(handle)


def deflated(text: str) -> bytes:
    """A serial form for store and wire: a fast level, which makes it three to ten times smaller."""
    return zlib.compress(text.encode("utf-8"), 1)


def inflated(payload: bytes, raw_bytes: int) -> str:
    """The serial form again; inflates no more than `raw_bytes`. Raises GrammarFailed for another length."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(payload, raw_bytes + 1)
    except zlib.error as error:
        raise GrammarFailed(f"a serialized grammar can't be inflated: {error}") from error
    if len(text) != raw_bytes or stream.unconsumed_tail or not stream.eof:
        raise GrammarFailed(f"a serialized grammar has other bytes than the {raw_bytes} that it should")
    return text.decode("utf-8")


def reason_of(error: Exception) -> str:
    """What the library says, without its times, its build's paths, and most of the input that it repeats."""
    text = re.split(r"\.cc:\d+:", str(error))[-1].strip()
    text = re.sub(r"^\[[0-9:]+\]\s*", "", text).splitlines()[0] if text else "no reason given"
    return text if len(text) <= TEXT_CHARS else text[:TEXT_CHARS] + "..."
