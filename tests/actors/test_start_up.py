"""What a rank decides at start-up: threads and cache sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.cache_sizes import cache_sizes, free_host_bytes
from engine.config import Settings
from engine.errors import ConfigError
from engine.memory.pages import ASIDE
from engine.model.config import ModelConfig
from engine.threads import ROUNDS, choose_threads, environment

MIB = 1 << 20


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return ModelConfig.from_json(model)


def test_a_cache_from_free_memory_stays_within_its_share(config: ModelConfig) -> None:
    settings = Settings(mem_fraction_static=0.5)
    for free in (2048 * MIB, 4096 * MIB, 8192 * MIB):
        assert cache_sizes(config, settings, 4, free).bytes <= free // 2


def test_the_share_is_that_of_where_the_cache_lies(config: ModelConfig) -> None:
    assert Settings().cache_share == 0.5
    assert Settings(device="cuda").cache_share == 0.9
    assert Settings(device="cuda", mem_fraction_static=0.3).cache_share == 0.3
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="must be in"):
            Settings(mem_fraction_static=wrong)


def test_a_cache_never_grows_beyond_what_the_running_requests_can_use(config: ModelConfig) -> None:
    settings = Settings(max_running_requests=2)
    sizes = cache_sizes(config, settings, 4, 1 << 50)
    assert sizes.full_pages - 1 - ASIDE == 2 * config.max_position_embeddings // 256


def test_a_given_number_of_tokens_is_kept(config: ModelConfig) -> None:
    settings = Settings(max_total_tokens=10_000, max_running_requests=4)
    assert cache_sizes(config, settings, 4, 1 << 40).full_pages - 1 - ASIDE == 40


def test_every_running_request_can_decode_while_one_prefills(config: ModelConfig) -> None:
    settings = Settings(swa_full_tokens_ratio=0.0, max_running_requests=6, chunked_prefill_size=1024)
    sizes = cache_sizes(config, settings, 4, 1 << 40)
    assert sizes.window_pages - 1 - ASIDE >= 6 * 2 + (1024 + config.sliding_window) // 256 + 1


def test_a_cache_that_doesnt_fit_is_refused_with_the_figures(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"need \d+ MiB, but \d+ MiB are its share of 100 MiB"):
        cache_sizes(config, Settings(), 4, 100 * MIB)


def test_free_memory_is_a_plausible_figure() -> None:
    assert MIB < free_host_bytes() < 1 << 50


class Clockwork:
    """Work that takes as long as the number of threads in use says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, taken_s: dict[int, float]) -> None:
        self.used: list[int] = []
        self.now_s = 0.0
        self.taken_s = taken_s
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)
        monkeypatch.setattr("engine.threads.allowed", lambda: max(taken_s))

    def work(self) -> None:
        self.now_s += self.taken_s[self.used[-1]]


@pytest.mark.parametrize(
    ("taken_s", "best"), [({1: 0.1, 8: 0.5}, 1), ({1: 0.1, 8: 0.09}, 1), ({1: 0.1, 8: 0.05}, 8)]
)
def test_more_threads_are_used_only_where_they_are_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, taken_s: dict[int, float], best: int
) -> None:
    clockwork, said = Clockwork(monkeypatch, taken_s), []
    assert choose_threads(0, clockwork.used.append, clockwork.work, said.append) == best
    assert clockwork.used[-1] == best
    assert "compute threads" in said[0]


def test_a_given_number_of_threads_is_used_unmeasured() -> None:
    used: list[int] = []
    assert choose_threads(3, used.append, lambda: pytest.fail("measured"), print) == 3
    assert used == [3]
    assert ROUNDS > 1
    assert environment(3)["OMP_NUM_THREADS"] == "3"
