"""The scheduler over the real model with drafts by script: each mode gives the text of plain decoding."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from engine.actors.capacity import CostTable, Curve
from engine.actors.core import Run, Send
from engine.actors.intake import RankSetup
from engine.actors.rank import Rank
from engine.actors.speculation import CAP_ACCEPT, COMPACT, STATIC, Speculation
from engine.memory.pools import KVState
from engine.messages import RequestFailed, RunStep, Sampling, StepOut, Submit, SubmitBatch
from engine.model.model import DeepseekV4
from engine.runner import speculative
from engine.runner.step import StepRunner
from tests.machines.test_rank_with_model import CPU, Served, model, submit
from tests.runner.scripted_drafter import ScriptedDrafter

__all__ = ["model"]
Texts = dict[int, list[int]]

BLOCK = 4
COSTS = CostTable(0.01, Curve([1], [0.0]), Curve([1, 64], [0.0, 0.063]), Curve([1], [0.001]))


class Drafting:
    """A rank that drafts what plain decoding said, with one in so many drafted tokens wrong.

    texts  by request id: prompt and output
    """

    def __init__(
        self, model: DeepseekV4, texts: dict[int, list[int]], mode: str, full_pages: int, wrong: int
    ) -> None:
        import torch

        state = KVState(model.config, 5, full_pages, 30, CPU, torch.float32)
        self.drafter = ScriptedDrafter(BLOCK, (1, 2))
        self.drafter.check_anchors = False
        self.drafter.wrong = {(slot, at) for slot in range(1, 5) for at in range(0, 1024, wrong)}
        self.runner = StepRunner(model, state, (1,), speculative.Speculation(self.drafter, state, mode))
        self.rank = Rank(
            RankSetup(
                rank=0,
                ranks=1,
                slots=4,
                queued=8,
                chunk_tokens=300,
                context_tokens=1024,
                window_tokens=model.config.sliding_window,
                full_pages=full_pages,
                window_pages=30,
                eos_ids=(1,),
                watchdog_ms=1000,
                speculation=Speculation(BLOCK, mode, COSTS),
            )
        )
        self.texts = texts
        self.jobs: deque[RunStep] = deque()
        self.text: dict[int, list[int]] = {}
        self.failed: list[RequestFailed] = []
        self.most = 0

    def tell(self, msg: object) -> None:
        for effect in self.rank.receive(msg):
            if isinstance(effect, Run):
                self.jobs.append(effect.job)
            elif isinstance(effect, Send) and isinstance(effect.msg, StepOut):
                tokens = np.frombuffer(effect.msg.token_ids, np.int32).tolist()
                ids = np.frombuffer(effect.msg.request_ids, np.int64).tolist()
                for request_id, count in zip(ids, effect.msg.counts, strict=True):
                    self.text.setdefault(request_id, []).extend(tokens[:count])
                    del tokens[:count]
                    self.most = max(self.most, count)
            elif isinstance(effect, Send) and isinstance(effect.msg, RequestFailed):
                self.failed.append(effect.msg)

    def run(self, *items: Submit) -> dict[int, list[int]]:
        """Every request's tokens."""
        for item in items:
            self.tell(SubmitBatch((item,)))
        while self.jobs:
            job = self.jobs.popleft()
            for bind in job.binds:
                self.drafter.texts[bind.slot] = [*self.texts[bind.request_id], *[2] * 3 * BLOCK]
            self.tell(self.runner.execute(job))
            assert self.rank.flight_reads_only_what_is_held()
            assert self.rank.accounts_agree()
        assert not self.failed
        return self.text


def plain_texts(
    model: DeepseekV4, requests: list[Submit]
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Output of each request alone, and its prompt with that output."""
    output = {
        item.request_id: Served(model, full_pages=20, chunk_tokens=1024).run(item)[item.request_id]
        for item in requests
    }
    prompts = {item.request_id: np.frombuffer(item.prompt, np.int32).tolist() for item in requests}
    return output, {key: prompts[key] + output[key] for key in output}


@pytest.fixture(scope="module")
def plain(model: DeepseekV4) -> tuple[list[Submit], Texts, Texts]:
    """Requests, what each gives alone, and their prompts with that."""
    requests = [submit(1, 236, 36), submit(2, 235, 36), submit(3, 234, 36), submit(4, 300, 8)]
    return requests, *plain_texts(model, requests)


@pytest.mark.parametrize("mode", [STATIC, CAP_ACCEPT, COMPACT])
def test_drafts_retraction_and_company_change_no_token(
    model: DeepseekV4, plain: tuple[list[Submit], Texts, Texts], mode: str
) -> None:
    """I13."""
    requests, output, texts = plain
    crowd = Drafting(model, texts, mode, full_pages=5, wrong=5)
    assert crowd.run(*requests) == output
    assert crowd.rank.planner.retracted[0] > 0
    assert crowd.most > 2


def test_penalties_count_the_same_tokens_with_drafts_right_or_wrong(model: DeepseekV4) -> None:
    how = {"frequency_penalty": 0.5, "repetition_penalty": 1.3}
    requests = [
        Submit(item.request_id, item.prompt, Sampling(24, temperature=0.0, ignore_eos=True, **how))
        for item in (submit(1, 236, 24), submit(2, 235, 24), submit(3, 234, 24))
    ]
    output, texts = plain_texts(model, requests)
    crowd = Drafting(model, texts, STATIC, full_pages=5, wrong=1)
    assert crowd.run(*requests) == output
    right = Drafting(model, texts, STATIC, full_pages=20, wrong=7)
    assert right.run(*requests) == output
    assert right.most > 2
