"""Two ranks that draft, as real processes, give every client the greedy tokens of one rank that doesn't."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import anyio
import numpy as np
import pytest

from api.served import load_served
from bench import traffic, traffic_clients
from bench.lossless_cases import read
from bench.serve import HOST, server
from engine.config import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Cases = list[tuple[list[int], int]]

REQUESTS = 120
KINDS = {"header": 1, "unrouted": 2, "mixed_batch": 1, "cancelled": 2}
"""Forms of requests and how often each comes, beside spells for one rank."""

LEAN = ("--threads", "1", "--max-running-requests", "8", "--max-total-tokens", "8192")


@pytest.fixture(scope="module")
def cases() -> Cases:
    """Prompts with lengths of their answers; some over a page."""
    found = read(load_served(Settings(), 0), 60)
    prompts = [np.frombuffer(case.ids, np.int32).tolist() for case in found]
    fitting = [prompt for prompt in prompts if len(prompt) <= 300][:24]
    return [(prompt, 1 + 7 * place % 31) for place, prompt in enumerate(fitting)]


@pytest.fixture(scope="module")
def expected(cases: Cases) -> list[list[int]]:
    """Of one rank without drafts."""
    with server(LEAN) as (port, child):
        found = anyio.run(traffic.answers, port, cases, backend_options={"use_uvloop": True})
        assert traffic.stop(child) == 0
    return found


@pytest.mark.parametrize("flags", [(), ("--ep", "2")], ids=["alone", "shared experts"])
def test_ranks_that_draft_answer_as_one_that_does_not(
    cases: Cases,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Spells in which one rank has everything and the other one is idle, within so few requests.
    monkeypatch.setattr(traffic_clients, "SPELL", 10)
    monkeypatch.setattr(traffic_clients, "CLIENTS", 12)
    monkeypatch.setattr(traffic_clients, "KINDS", KINDS)
    with server([*LEAN, "--dp", "2", *flags, "--speculative", "dspark"]) as (port, child):
        told = traffic_clients.Traffic(port, 2, cases, expected, REQUESTS)
        anyio.run(told.run, backend_options={"use_uvloop": True})
        left = traffic.wait_settled(port, 2)
        shown = urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=60).read().decode()
        assert traffic.stop(child) == 0
    assert not told.faults
    assert not left
    assert told.done.keys() == KINDS.keys()
    accepted = re.findall(r'^sglang:spec_accepted_tokens_total{.*dp_rank="(\d)".*} (\S+)$', shown, re.M)
    assert {rank for rank, count in accepted if float(count) > 0} == {"0", "1"}
