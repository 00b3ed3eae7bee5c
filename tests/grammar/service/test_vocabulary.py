"""What the server's workers compile for the shipped model is what its ranks load, from the store too.

The marker of tool calls is matched by its id. Who takes it for one more special token gets other masks.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from api.gate import gate_of
from api.served import Served, load_served
from engine import front
from engine.actors.process import Process
from engine.actors.wiring import wiring
from engine.config import NANO, Settings
from engine.errors import GrammarFailed
from engine.front import start_grammars
from engine.grammar.compiler import Compiler
from engine.grammar.gate import GatePolicy, Tool, tool_call_grammar
from engine.grammar.key import GrammarKey
from engine.grammar.rank_grammars import begin_compiler
from engine.grammar.tokenizer_info import vocabulary_of
from engine.messages import GrammarArtifact
from engine.model.config import ModelConfig, eos_of

FIND = Tool("find", {"type": "object", "properties": {"city": {"type": "string"}}}, strict=True)


@pytest.fixture(scope="module")
def served() -> Served:
    return load_served(Settings(), 0)


@pytest.fixture(scope="module")
def rank(served: Served) -> Compiler:
    """As `load_model` has it, self-test included."""
    config = ModelConfig.from_json(NANO)
    return begin_compiler(NANO, served.tokenizer, config.vocab_size, eos_of(config, NANO)).result()


def calls(served: Served) -> GrammarKey:
    """A grammar that begins with a call in the model's own markup, so that probes come to the marker."""
    markup = gate_of(GatePolicy(), served.encoding, served.tokenizer).markup
    assert markup is not None
    return tool_call_grammar([FIND], markup, required=True)


def made(served: Served, store: Path, key: GrammarKey) -> tuple[str, GrammarArtifact]:
    """(source, artifact) of a server that begins with this store."""
    found: list[tuple[str, GrammarArtifact]] = []

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            process = Process("api", wiring(), tasks, print)
            settings = Settings(grammar_cache_dir=str(store), grammar_workers=1, grammar_timeout_s=100.0)
            service = start_grammars(process, settings, served)
            with anyio.fail_after(100):
                await service.pool.started.wait()
            async with service.grammar(key) as ready:
                found.append((ready.source, ready.value))
            with anyio.fail_after(100):
                while not service.counters.finished:
                    await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()

    anyio.run(main, backend="asyncio")
    return found[0]


def test_calls_that_a_server_compiled_or_has_in_its_store_have_the_masks_of_its_ranks(
    served: Served, rank: Compiler, tmp_path: Path
) -> None:
    key = calls(served)
    for expected in ({"compile"}, {"disk", "local_compile_marker"}):
        source, artifact = made(served, tmp_path, key)
        assert source in expected
        assert rank.probe(rank.load(artifact)) == artifact.probe == rank.probe(rank.compile(key))


def test_a_server_that_takes_the_marker_for_text_is_noticed_by_its_ranks(
    served: Served, rank: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "model_vocabulary", lambda _, *rest: vocabulary_of(*rest))
    _, artifact = made(served, tmp_path, calls(served))
    with pytest.raises(GrammarFailed, match="other masks"):
        rank.load(artifact)
