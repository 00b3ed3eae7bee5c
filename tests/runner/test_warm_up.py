"""Which prompts a start on a device runs before anybody's, and that they leave nothing behind."""

from __future__ import annotations

import pytest

from engine.config import PAGE_TOKENS, Settings
from engine.messages import RunStep, StepDone
from engine.model.model import DeepseekV4
from engine.warm_up import _WarmSteps, chunk_sizes, warm_up
from tests.machines.test_rank_with_model import Served, submit


def noted(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step that runs from now on."""
    ran, execute = list[int](), served.runner.execute

    def run(job: RunStep) -> StepDone:
        ran.append(len(job.tokens) // 4)
        return execute(job)

    monkeypatch.setattr(served.runner, "execute", run)
    return ran


def test_every_cut_of_up_to_the_largest_chunk_has_a_size() -> None:
    for most in (1, 2, 16, 100, 1024, 8192):
        sizes = chunk_sizes(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        # One in each range from a power of two to the next, and beyond 16 one that 16 doesn't divide.
        for power in (1 << k for k in range(1, most.bit_length() - 1)):
            own = [size for size in sizes if power < size <= 2 * power]
            assert own
            assert power < 16 or any(size % 16 for size in own)


def test_prompts_of_all_sizes_run_and_requests_get_what_they_get_without(
    native: DeepseekV4, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Served(native, 20, 1024).run(submit(1, 20, 9), submit(2, 126, 9))
    served = Served(native, 20, 1024)
    ran = noted(served, monkeypatch)
    steps = _WarmSteps(served.runner)
    steps.prompts(1024)
    steps.logits(5)
    assert ran == chunk_sizes(1024)
    monkeypatch.undo()
    assert served.run(submit(1, 20, 9), submit(2, 126, 9)) == wanted


def test_a_cache_with_less_room_takes_what_fits(native: DeepseekV4, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three full pages one is the sink."""
    served = Served(native, 3, 1024)
    ran = noted(served, monkeypatch)
    _WarmSteps(served.runner).prompts(1024)
    assert ran == chunk_sizes(2 * PAGE_TOKENS)


def test_no_prompt_is_longer_than_a_request_may_be(
    native: DeepseekV4, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(native, 20, 1024)
    ran = noted(served, monkeypatch)
    settings = Settings(device="cuda", chunked_prefill_size=1024, context_length=100)
    warm_up(served.runner, settings, lambda text: None)
    assert max(ran) == 100
