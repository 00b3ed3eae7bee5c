"""Real processes of two ranks: killed, stopped, slow, told to end; all clients hear it, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.actors.servers import wait_for
from tests.actors.test_processes import LONG, PROMPT, WITHIN_S, Server, events, gone

pytestmark = pytest.mark.slow
SHARED = "/dev/shm/"
EXCHANGES = ["links", "native"]
EVERY_EXCHANGE = [*EXCHANGES, "collective"]
"""The collective one imports torch in each rank, which takes seconds: two tests have it."""


class Pair(Server):
    """A server with two ranks."""

    def __init__(self, model: Path, exchange: str, **environment: str) -> None:
        self.shared: set[Path] = set()
        told = {"TRIVIAL_DP": "2", "TRIVIAL_EXCHANGE": exchange, **environment}
        super().__init__(model, **told)

    @property
    def ranks(self) -> list[int]:
        """The ranks' process ids, in their order."""
        return self.children("trivial.py rank")

    def streams(self) -> list[Stream]:
        """An endless stream on each rank, both begun."""
        self.note_shared()
        found = [Stream(self, rank) for rank in range(2)]
        for stream in found:
            assert stream.begun.wait(WITHIN_S)
        return found

    def note_shared(self) -> set[Path]:
        """Names in shared memory under which the ranks have met, or wait to."""
        for rank in self.ranks:
            lines = Path(f"/proc/{rank}/maps").read_text().splitlines()
            found = [line.removesuffix(" (deleted)").partition(SHARED)[2] for line in lines]
            self.shared |= {Path(SHARED + name) for name in found if name}
        return self.shared

    def left(self) -> list[Path]:
        """What remains of that."""
        return [path for path in self.shared if path.exists()]


class Stream(threading.Thread):
    """A client that reads to the end."""

    def __init__(self, server: Server, rank: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.told: list[str] = []
        self.over_s = 0.0
        self._server, self._rank = server, rank
        self.start()

    def run(self) -> None:
        body = {**LONG, "routed_dp_rank": self._rank}
        url = self._server.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=WITHIN_S, verify=False) as answer:
            if answer.status_code != 200:
                # The rank was lost before the stream's first event: the error is the whole answer.
                self.told += [answer.read().decode(), "[DONE]"]
            for line in answer.iter_lines() if answer.status_code == 200 else ():
                self.told += events(line)
                self.begun.set()
        self.over_s = time.monotonic()

    def error(self) -> str:
        """The text of the error event that ended it."""
        self.join(WITHIN_S)
        assert self.told[-1] == "[DONE]"
        return str(json.loads(self.told[-2])["error"]["message"])


@pytest.fixture
def started() -> Iterator[list[Pair]]:
    """Servers of a test; whatever lives after it is killed."""
    servers: list[Pair] = []
    yield servers
    for server in servers:
        server.close()


@pytest.mark.parametrize("exchange", EVERY_EXCHANGE)
def test_a_killed_rank_ends_every_stream_at_once_and_then_the_whole_server(
    model: Path, started: list[Pair], exchange: str
) -> None:
    started.append(server := Pair(model, exchange))
    server.wait_ready()
    ranks = server.ranks
    streams = server.streams()
    # The peer hears it by the exchange alone: where the launcher is quicker, it does as it is told.
    server.process.send_signal(signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    assert gone(ranks[0])
    server.process.send_signal(signal.SIGCONT)
    causes = {stream.error() for stream in streams}
    assert causes <= {
        "rank 1 has ended: was killed by SIGKILL",
        "rank 0 has ended: ended with exit code 1",
    }
    code, printed = server.end()
    assert code == 1
    assert "rank1 was killed by SIGKILL" in printed
    assert "rank0: PeerDead: " in printed
    assert all(map(gone, ranks))
    assert not server.left()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_stopped_rank_is_given_up_within_the_time_out_and_killed(
    model: Path, started: list[Pair], exchange: str
) -> None:
    # The peer notices, long before the launcher would.
    limits = {"TRIVIAL_WATCHDOG_S": "3", "TRIVIAL_SILENCE_S": "8"}
    started.append(server := Pair(model, exchange, **limits))
    server.wait_ready()
    ranks = server.ranks
    streams = server.streams()
    os.kill(ranks[1], signal.SIGSTOP)
    causes = {stream.error() for stream in streams}
    assert causes == {"rank 0 has ended: ended with exit code 1"}
    code, printed = server.end()
    assert code == 1
    assert "ranks [1] not heard" in printed or "rank0: ExchangeTimeout: " in printed
    assert "rank1 was killed by SIGKILL" in printed
    assert all(map(gone, ranks))
    assert not server.left()


def test_a_slow_rank_slows_its_peer_and_ends_nothing(model: Path, started: list[Pair]) -> None:
    started.append(server := Pair(model, "links", TRIVIAL_FAULT="slow", TRIVIAL_FAULT_RANK="1"))
    server.wait_ready()
    began_s = time.monotonic()
    answer = server.post({**PROMPT, "max_tokens": 40, "routed_dp_rank": 0})
    assert answer.status_code == 200
    assert time.monotonic() - began_s > 1.0
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("fault", ["hang", "break"])
def test_a_rank_whose_device_fails_takes_the_other_one_with_it(
    model: Path, started: list[Pair], tmp_path: Path, exchange: str, fault: str
) -> None:
    when = tmp_path / "both have begun"
    planted = {"TRIVIAL_FAULT": fault, "TRIVIAL_FAULT_RANK": "1", "TRIVIAL_FAULT_WHEN": str(when)}
    planted["TRIVIAL_HANG_S"] = "3"
    started.append(server := Pair(model, exchange, **planted))
    server.wait_ready()
    ranks = server.ranks
    streams = server.streams()
    when.touch()
    assert all("has ended" in stream.error() for stream in streams)
    code, printed = server.end()
    assert code == 1
    assert ("ended in state stalled" if fault == "hang" else "an illegal address") in printed
    assert all(map(gone, ranks))
    assert not server.left()


@pytest.mark.parametrize("exchange", EVERY_EXCHANGE)
def test_two_ranks_end_cleanly_together_idle_or_busy(model: Path, started: list[Pair], exchange: str) -> None:
    started.append(server := Pair(model, exchange))
    server.wait_ready()
    ranks = server.ranks
    for rank in (0, 1, 1, 0):
        assert server.post({**PROMPT, "routed_dp_rank": rank}).status_code == 200
    streams = server.streams()
    server.signal(signal.SIGTERM, 2)
    assert {stream.error() for stream in streams} == {"the server is stopping"}
    assert server.end()[0] == 0
    assert all(map(gone, ranks))
    assert not server.left()


def test_a_signal_while_one_of_two_ranks_loads_ends_both_cleanly(model: Path, started: list[Pair]) -> None:
    started.append(server := Pair(model, "links", TRIVIAL_FAULT="slow load", TRIVIAL_FAULT_RANK="1"))
    server.wait_starting()
    ranks = server.ranks
    refused = server.post(PROMPT)
    assert refused.status_code == 503
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert all(map(gone, ranks))


def test_a_rank_that_is_killed_while_it_loads_ends_the_server(model: Path, started: list[Pair]) -> None:
    # The other one waits for it on a thread, and is ended by force.
    planted = {"TRIVIAL_FAULT": "slow load", "TRIVIAL_FAULT_RANK": "1", "TRIVIAL_STOP_S": "2"}
    started.append(server := Pair(model, "native", **planted))
    server.wait_starting()
    ranks = server.ranks
    assert wait_for(lambda: server.note_shared() != set())
    os.kill(ranks[1], signal.SIGKILL)
    code, printed = server.end()
    assert code == 1
    assert "rank1 was killed by SIGKILL" in printed
    assert all(map(gone, ranks))
    assert not server.left()


def test_a_killed_server_takes_both_ranks_with_it(model: Path, started: list[Pair]) -> None:
    started.append(server := Pair(model, "links"))
    server.wait_ready()
    ranks = server.ranks
    server.process.kill()
    assert all(map(gone, ranks))


def test_an_unknown_rank_is_refused_and_a_mixed_batch_reaches_the_ranks_that_it_names(
    model: Path, started: list[Pair]
) -> None:
    started.append(server := Pair(model, "links"))
    server.wait_ready()
    assert server.post({**PROMPT, "routed_dp_rank": 2}).status_code == 400
    body = {"text": ["a", "b", "c"], "sampling_params": {"max_new_tokens": 2}, "routed_dp_rank": [1, 0, 1]}
    answer = httpx.post(server.url + "/generate", json=body, timeout=WITHIN_S)
    assert [one["meta_info"]["dp_rank"] for one in answer.json()] == [1, 0, 1]
    whole = {**body, "routed_dp_rank": None}
    headers = {"X-Data-Parallel-Rank": "1"}
    answer = httpx.post(server.url + "/generate", json=whole, headers=headers, timeout=WITHIN_S)
    assert [one["meta_info"]["dp_rank"] for one in answer.json()] == [1, 1, 1]
    shown = httpx.get(server.url + "/metrics", timeout=WITHIN_S).text
    assert 'sglang:dp_atomic_batch_items_total{model_name="nano",policy="explicit",rank="1"} 3.0' in shown
    assert 'sglang:dp_routed_requests_total{model_name="nano",policy="explicit",rank="0"} 1.0' in shown
