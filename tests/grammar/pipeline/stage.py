"""A rank over the shipped model, whose requests have grammars; matchers come when a test says so."""

from __future__ import annotations

from collections import deque
from functools import cache

import msgspec
import numpy as np
import torch

from engine.actors.core import Run, Send
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.actors.speculation import Speculation as HowToSpeculate
from engine.config import NANO
from engine.grammar.compiler import Compiler, compiled_of, whole_library
from engine.grammar.key import GrammarKey
from engine.grammar.matchers import Matcher
from engine.grammar.pipeline import Pipeline
from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.messages import (
    GrammarArtifact,
    MatcherLeft,
    MatcherReady,
    MatcherWanted,
    RequestFailed,
    RunStep,
    Sampling,
    StepDone,
    StepOut,
    Submit,
    SubmitBatch,
)
from engine.model.checkpoint import load_checkpoint
from engine.model.draft import Drafter
from engine.model.draft_loading import load_drafter
from engine.model.model import DeepseekV4
from engine.model.tokenizer import Tokenizer, load_tokenizer
from engine.runner.speculative import Speculation
from engine.runner.step import StepRunner
from tests.grammar.service.stage import STOP, WIDTH, vocabulary

CPU = torch.device("cpu")
SLOTS = 8
THINK_END = "</think>"

JSON = GrammarKey(
    "ebnf",
    r"""root ::= "{" pair ("," pair)? "}"
pair ::= "\"" [a-z]{1,4} "\"" ":" value
value ::= [0-9]{1,3} | "\"" [a-zA-Z ]{0,6} "\"" | "true" | "false"
""",
)
NUMBERS = GrammarKey("ebnf", r'root ::= [0-9]{1,2} ("," [0-9]{1,2}){2,3}')
WORDS = GrammarKey("ebnf", r'root ::= "yes" | "no" | "perhaps, or perhaps not"')
TEXT = GrammarKey("ebnf", r"root ::= [a-z ]{5,15} [.!]")


@cache
def tokenizer() -> Tokenizer:
    """Of the shipped model."""
    return load_tokenizer(NANO)


@cache
def compiler() -> Compiler:
    """Over the shipped vocabulary."""
    return Compiler(vocabulary(), whole_library())


@cache
def shipped() -> tuple[DeepseekV4, Drafter]:
    """The shipped model and its draft, with kernels whose rows don't depend on each other."""
    config, weights = load_checkpoint(NANO, torch.float32, CPU, draft=True, progress=lambda *_: None)
    model = DeepseekV4(
        config,
        weights,
        device="cpu",
        dtype=torch.float32,
        deterministic=True,
        kv_rounding="none",
        ops=CpuOps(),
    )
    return model, load_drafter(config, weights, model)


@cache
def artifact(key: GrammarKey) -> bytes:
    """What comes with a request."""
    handle = compiler().compile(key)
    made = GrammarArtifact(
        key.wire(), b"", 0, compiler().probe(handle), int(handle.memory_size_bytes()), 0.01, 0.0
    )
    return msgspec.msgpack.encode(made)


def matcher_of(key: GrammarKey) -> Matcher:
    """A fresh one."""
    return Matcher(compiled_of(compiler().compile(key)), WIDTH)


def follows(key: GrammarKey, tokens: list[int]) -> bool:
    """Whether a fresh matcher takes these tokens, of which the last one ends the grammar."""
    return matcher_of(key).advance(tokens) == (len(tokens), True)


def submit(
    request_id: int,
    text: str,
    key: GrammarKey | None,
    most: int = 60,
    root: str = "start",
    **sampling: object,
) -> Submit:
    """A request; greedy by default."""
    how: dict[str, object] = {"temperature": 0.0, "seed": request_id, **sampling}
    prompt = np.array(tokenizer().encode(text), np.int32).tobytes()
    return Submit(
        request_id,
        prompt,
        Sampling(most, **how),  # type: ignore[arg-type]
        grammar_key=key.wire() if key else "",
        grammar=artifact(key) if key else b"",
        grammar_root=root,
    )


class Served:
    """One rank, its device, and what its clients got.

    text     tokens by request        finish  finish code and status, message of those that failed
    pipeline of its grammars          done    results of all steps
    left     requests whose matchers are gone
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        mode: str = "static",
        full_pages: int = 40,
        budget_s: float = 10.0,
    ) -> None:
        model, _ = shipped()
        state = KVState(model.config, SLOTS + 1, full_pages, 60, CPU, torch.float32)
        block = 0 if drafter is None else drafter.block
        think_end = tokenizer().control_ids[THINK_END]
        self.pipeline = Pipeline(WIDTH, [STOP], think_end, CPU, SLOTS + 1, block + 1, budget_s)
        speculation = None if drafter is None else Speculation(drafter, state, mode)  # type: ignore[arg-type]
        self.runner = StepRunner(model, state, (STOP,), speculation, self.pipeline)
        self.rank = Rank(
            RankSetup(
                rank=0, ranks=1, slots=SLOTS, queued=16, chunk_tokens=1024, context_tokens=1024,
                window_tokens=model.config.sliding_window, full_pages=full_pages, window_pages=60,
                eos_ids=(STOP,), watchdog_ms=1000,
                speculation=None if drafter is None else HowToSpeculate(block, mode),
            )
        )  # fmt: skip
        self.jobs: deque[RunStep] = deque()
        self.text: dict[int, list[int]] = {}
        self.finish: dict[int, tuple[int, int, str]] = {}
        self.wanted: dict[int, MatcherWanted] = {}
        self.left: list[int] = []
        self.done: list[StepDone] = []
        self.most = 0

    def tell(self, msg: object) -> None:
        """A message to the rank, and what leaves it."""
        for effect in self.rank.receive(msg):
            if isinstance(effect, Run):
                self.jobs.append(effect.job)
            elif isinstance(effect, Send):
                self._hear(effect.msg)

    def _hear(self, msg: object) -> None:
        if isinstance(msg, StepOut):
            tokens = np.frombuffer(msg.token_ids, np.int32).tolist()
            ids = np.frombuffer(msg.request_ids, np.int64).tolist()
            for request_id, count, finish in zip(ids, msg.counts, msg.finish, strict=True):
                assert request_id not in self.finish
                self.text.setdefault(request_id, []).extend(tokens[:count])
                del tokens[:count]
                self.most = max(self.most, count)
                if finish:
                    self.finish[request_id] = (finish, 200, "")
        elif isinstance(msg, RequestFailed):
            self.finish[msg.request_id] = (msg.reason, msg.status, msg.message)
        elif isinstance(msg, MatcherWanted):
            self.wanted[msg.request_id] = msg
        elif isinstance(msg, MatcherLeft):
            self.left.append(msg.request_id)
            self.pipeline.leave(msg.request_id)

    def load(self) -> None:
        """Every grammar that is wanted."""
        for request_id, msg in list(self.wanted.items()):
            del self.wanted[request_id]
            key = GrammarKey.from_wire(msgspec.msgpack.decode(msg.grammar, type=GrammarArtifact).key)
            self.pipeline.enter(request_id, matcher_of(key), msg.prompt_tokens, msg.root == "after_think")
            self.tell(MatcherReady(request_id))

    def step(self) -> bool:
        """One step ends; False where the device has none."""
        if not self.jobs:
            return False
        job = self.jobs.popleft()
        self.done.append(self.runner.execute(job))
        self.tell(self.done[-1])
        assert self.rank.flight_reads_only_what_is_held()
        assert self.rank.accounts_agree()
        return True

    def drain(self) -> None:
        """All steps, and grammars as they are wanted."""
        self.load()
        while self.step():
            self.load()

    def run(self, *items: Submit) -> dict[int, list[int]]:
        """Every request's tokens."""
        for item in items:
            self.tell(SubmitBatch((item,)))
        self.drain()
        assert set(self.left) == {item.request_id for item in items if item.grammar}
        return self.text

    def close(self) -> None:
        """Ends its thread."""
        self.pipeline.close()
