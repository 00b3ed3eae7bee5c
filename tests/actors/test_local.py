"""The whole engine in one process: real scheduler, links, detokenizer; a runner without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.served import load_served
from engine.config import Settings
from engine.errors import BadRequest, CheckpointError, DeviceFailed
from engine.local import engine_of
from engine.messages import LENGTH, Entry, Sampling, StepDone
from tests.actors.loops import both_real_loops
from tests.actors.trivial import OneToken, TrivialParts

pytestmark = [pytest.mark.anyio, both_real_loops]


def entry(tokens: int, child: int = 0) -> Entry:
    prompt = np.arange(10, 20, dtype=np.int32).tobytes()
    return Entry(
        sink=0, prompt=prompt, sampling=Sampling(max_new_tokens=tokens, ignore_eos=True), child=child
    )


async def results(engine: Any, entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Request id -> (tokens, finish)."""
    group = await engine.submit(entries)
    found: dict[int, tuple[int, int]] = {}
    while taken := await group.take():
        for delta in taken:
            before, _ = found.get(delta.request_id, (0, 0))
            found[delta.request_id] = (before + len(delta.token_ids), delta.finish)
    return found


async def test_every_request_gets_its_tokens_and_one_end(model: Path) -> None:
    settings = Settings(model_path=str(model))
    async with engine_of(settings, load_served(settings, 0), TrivialParts()) as engine:
        found = await results(engine, [entry(tokens, child=tokens) for tokens in (1, 5, 20)])
    assert sorted(found.values()) == [(1, LENGTH), (5, LENGTH), (20, LENGTH)]


async def test_a_refusal_reaches_its_asker_and_harms_nobody(model: Path) -> None:
    settings = Settings(model_path=str(model))
    async with engine_of(settings, load_served(settings, 0), TrivialParts()) as engine:
        with pytest.raises(BadRequest, match="routed_dp_rank"):
            await engine.submit([entry(1)], route=7)
        assert list((await results(engine, [entry(2)])).values()) == [(2, LENGTH)]


class Breaks(OneToken):
    """A device that fails at its third step."""

    def execute(self, job: Any) -> StepDone:
        if job.epoch == 2:
            raise RuntimeError("an illegal address was encountered")
        return super().execute(job)


class BreakingParts(TrivialParts):
    """Parts with that device."""

    def load(self, settings: Settings, say: Any) -> OneToken:
        return Breaks()


class MissingParts(TrivialParts):
    """Parts whose checkpoint lacks a tensor."""

    def load(self, settings: Settings, say: Any) -> OneToken:
        raise CheckpointError("embed.weight is missing")


@pytest.mark.parametrize(
    ("parts", "cause"), [(BreakingParts(), "an illegal address"), (MissingParts(), "embed.weight is missing")]
)
async def test_what_breaks_the_device_ends_the_program_with_its_cause(
    model: Path, parts: Any, cause: str
) -> None:
    settings = Settings(model_path=str(model))

    async def run() -> None:
        async with engine_of(settings, load_served(settings, 0), parts) as engine:
            await results(engine, [entry(50)])

    with pytest.raises(BaseExceptionGroup) as raised:
        await run()
    found = raised.value.subgroup(DeviceFailed)
    assert found is not None
    assert cause in repr(found)
