"""The scheduler over the real model: company, chunks and retraction change no token of a greedy answer."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from engine.actors.core import Run, Send
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.fsm.owners import ROOT
from engine.memory.pools import KVState
from engine.messages import RequestFailed, RunStep, Sampling, StepOut, Submit, SubmitBatch
from engine.model.config import ModelConfig
from engine.model.dummy import dummy_weights
from engine.model.model import DeepseekV4
from engine.runner.step import StepRunner

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 32,
    "num_nextn_predict_layers": 0,
}


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    """A small random model, row-invariant."""
    named = json.loads((ROOT / "tests" / "actors" / "geometry.json").read_text())
    config = ModelConfig.from_dict({**named, **SMALL})
    weights = dummy_weights(config, torch.float32, CPU)
    return DeepseekV4(
        config, weights, device="cpu", dtype=torch.float32, deterministic=True, kv_rounding="none"
    )


class Served:
    """A rank over the model; steps end in order."""

    def __init__(self, model: DeepseekV4, full_pages: int, chunk_tokens: int) -> None:
        state = KVState(model.config, 5, full_pages, 30, CPU, torch.float32)
        self.runner = StepRunner(model, state, (1,))
        self.rank = Rank(
            RankSetup(
                rank=0,
                ranks=1,
                slots=4,
                queued=8,
                chunk_tokens=chunk_tokens,
                context_tokens=1024,
                window_tokens=model.config.sliding_window,
                full_pages=full_pages,
                window_pages=30,
                eos_ids=(1,),
                watchdog_ms=1000,
            )
        )
        self.jobs: deque[RunStep] = deque()
        self.text: dict[int, list[int]] = {}
        self.failed: list[RequestFailed] = []

    def tell(self, msg: object) -> None:
        for effect in self.rank.receive(msg):
            if isinstance(effect, Run):
                self.jobs.append(effect.job)
            elif isinstance(effect, Send) and isinstance(effect.msg, StepOut):
                tokens = np.frombuffer(effect.msg.token_ids, np.int32).tolist()
                for request_id in np.frombuffer(effect.msg.request_ids, np.int64).tolist():
                    self.text.setdefault(request_id, []).append(tokens.pop(0))
            elif isinstance(effect, Send) and isinstance(effect.msg, RequestFailed):
                self.failed.append(effect.msg)

    def run(self, *items: Submit) -> dict[int, list[int]]:
        """Every request's tokens."""
        for item in items:
            self.tell(SubmitBatch((item,)))
        while self.jobs:
            self.tell(self.runner.execute(self.jobs.popleft()))
        assert not self.failed
        return self.text


def submit(request_id: int, prompt: int, most: int, **how: Any) -> Submit:
    tokens = np.random.default_rng(request_id).integers(2, 256, prompt).astype(np.int32)
    sampling = Sampling(most, temperature=0.0, ignore_eos=True, **how)
    return Submit(request_id, tokens.tobytes(), sampling)


def test_company_chunks_and_retraction_change_no_token(model: DeepseekV4) -> None:
    requests = [submit(1, 236, 36), submit(2, 235, 36), submit(3, 234, 36), submit(4, 300, 8)]
    crowd = Served(model, full_pages=5, chunk_tokens=200)
    together = crowd.run(*requests)
    assert crowd.rank.planner.retracted[0] > 0
    for item in requests:
        alone = Served(model, full_pages=20, chunk_tokens=1024).run(item)
        assert together[item.request_id] == alone[item.request_id]


def test_seeded_sampling_with_penalties_survives_retraction(model: DeepseekV4) -> None:
    how = {"seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    requests = [
        Submit(item.request_id, item.prompt, Sampling(36, temperature=0.8, ignore_eos=True, **how))
        for item in (submit(1, 236, 36), submit(2, 235, 36), submit(3, 234, 36))
    ]
    crowd = Served(model, full_pages=5, chunk_tokens=300)
    together = crowd.run(*requests)
    assert crowd.rank.planner.retracted[0] > 0
    for item in requests:
        alone = Served(model, full_pages=20, chunk_tokens=1024).run(item)
        assert together[item.request_id] == alone[item.request_id]
