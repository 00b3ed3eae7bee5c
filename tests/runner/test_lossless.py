"""The losslessness benchmark at a small size: it compares what it says, and notices what it should."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from api.served import load_served
from bench import lossless
from bench.drafting import Diverged
from bench.drafting_figures import NothingDrafted
from bench.lossless_cases import PIECE_TOKENS, Case, Setting, read, settings_list
from engine.config import PAGE_TOKENS, Settings
from engine.errors import EngineError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SETTINGS = Settings(threads=1, deterministic=True, max_running_requests=16, max_total_tokens=8192)
TOKENS = 48
MODES = ("static", "cap-accept", "compact")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Half of them end so far below the end of a page that whole answers alone cross it."""
    found = read(load_served(SETTINGS, 0), 100)
    length = PAGE_TOKENS - TOKENS + 6
    crossing = [
        replace(case, ids=case.ids[: 4 * length], ignore_eos=True)
        for case in found
        if len(case.ids) // 4 >= length
    ]
    short = [case for case in found if len(case.ids) // 4 < 100]
    return [*crossing[:5], *short[:5]]


def test_drafts_leave_the_text_in_every_mode_and_through_retractions(cases: list[Case]) -> None:
    tight = {"max_total_tokens": 1024, "chunked_prefill_size": 64}
    plan = [
        Setting("static, small cache", {"speculative_verify_mode": "static", **tight}, share=(0, 1)),
        Setting("cap-accept", {"speculative_verify_mode": "cap-accept"}, concurrency=16, share=(0, 2)),
        Setting("compact, 7 drafted tokens", {"speculative_num_draft_tokens": 7}, share=(1, 2)),
    ]
    figures = lossless.compare(SETTINGS, plan, cases, TOKENS)
    compared = figures["compared"]
    assert (compared["prompts"], compared["mismatches"]) == (20, 0)
    assert compared["tokens"] > 600
    assert compared["accepted"] > compared["tokens"] / 3
    assert all(one["mixed_steps"] for one in figures["settings"].values())
    assert all(figures["settings"][one.name]["trimmed"] for one in plan[1:])
    assert compared["retracted"] > 0


def test_prompts_are_of_all_kinds_and_lengths_and_the_same_in_every_run() -> None:
    served = load_served(SETTINGS, 0)
    cases = read(served, 200)
    assert cases == read(served, 200)
    assert len({case.ids for case in cases}) > 190
    lengths = {len(case.ids) // 4 for case in cases}
    assert set(PIECE_TOKENS) <= lengths
    assert sum(not case.ignore_eos for case in cases) > 50
    assert len({case.kind for case in cases}) >= 12
    assert all(np.frombuffer(case.ids, np.int32).max() < served.bounds.vocab_size for case in cases)


def test_the_settings_cover_modes_mixes_chunks_and_blocks_with_enough_prompts_each() -> None:
    plan = settings_list()
    modes = {str(one.changes.get("speculative_verify_mode", "compact")) for one in plan}
    assert modes == set(MODES)
    assert {one.concurrency for one in plan} == {1, 8, 32}
    assert {one.changes.get("chunked_prefill_size", 1024) for one in plan} == {64, 1024}
    assert {one.changes.get("speculative_num_draft_tokens", 5) for one in plan} == {3, 5, 7}
    assert sum(lossless.SMALL in one.name for one in plan) >= 3
    seen = set()
    for one in plan:
        places = range(200)[slice(one.share[0], None, one.share[1])]
        assert len(places) >= 50
        seen |= set(places)
    assert seen == set(range(200))


def test_one_other_token_is_noticed(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = lossless._answers

    async def altered(settings: Settings, *args: object) -> lossless.Run:
        found = await answers(settings, *args)  # type: ignore[arg-type]
        if settings.speculative_algorithm:
            found.tokens[1][5] += 1
        return found

    monkeypatch.setattr(lossless, "_answers", altered)
    with pytest.raises(Diverged, match=r"1 of 3 answers differ; prompt 1 has 12 tokens, not 12, .* token 5"):
        lossless.compare(SETTINGS, [Setting("compact", share=(0, 1))], cases[-3:], tokens=12)


def test_a_small_cache_without_retractions_and_drafts_that_never_come_are_faults(cases: list[Case]) -> None:
    plan = [Setting("static, small cache", {"speculative_verify_mode": "static"}, share=(0, 1))]
    with pytest.raises(EngineError, match="no request was retracted"):
        lossless.compare(SETTINGS, plan, cases[-2:], tokens=12)
    with pytest.raises(NothingDrafted, match="0 drafted tokens were verified, none was accepted"):
        lossless.compare(SETTINGS, [Setting("compact", share=(0, 1))], cases[-2:], tokens=1)
