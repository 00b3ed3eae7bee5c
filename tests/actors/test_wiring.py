"""specs/system.toml in force: who may send what, what passes a link, what a mailbox does when full."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.actors.wiring import digest_of, kind_of, wiring
from engine.messages import Abort, RankUp, RunStep, Snapshot, StepDone, StepOut, SubmitBatch, Watch


def test_an_actor_may_send_what_the_description_lists_and_nothing_else() -> None:
    may_send = wiring().sends_of("ingress")
    assert may_send("rank0", SubmitBatch)
    assert may_send("rank13", Abort)
    assert may_send("detok", Watch)
    assert not may_send("detok", SubmitBatch)
    assert not may_send("rank0", StepOut)
    assert not may_send("nobody", Abort)


def test_a_link_decodes_what_comes_from_other_processes_only() -> None:
    at_rank = wiring().accepts("rank")["rank"]
    assert {SubmitBatch, Abort} <= set(at_rank)
    assert StepDone not in at_rank
    at_api = wiring().accepts("api")
    assert StepOut in at_api["detok"]
    assert Watch not in at_api["detok"]
    assert Snapshot in at_api["api"]
    assert RankUp in at_api["ingress"]
    assert all(RunStep not in types for types in at_api.values())


def test_a_rank_may_wait_for_the_detokenizer_and_the_server_waits_for_no_rank() -> None:
    assert wiring().waits("api")
    assert not wiring().waits("rank")


def test_an_actors_kind_is_its_name_without_the_number() -> None:
    assert [kind_of(name) for name in ("rank0", "rank12", "detok")] == ["rank", "rank", "detok"]


def test_a_changed_spec_changes_what_hello_compares(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("name = 1\n")
    before = digest_of(tmp_path)
    assert digest_of(tmp_path) == before
    (tmp_path / "a.toml").write_text("name = 2\n")
    changed = digest_of(tmp_path)
    (tmp_path / "a.toml").rename(tmp_path / "b.toml")
    assert len({before, changed, digest_of(tmp_path)}) == 3


@pytest.mark.parametrize("name", ["ingress", "detok", "health", "shutdown", "rank0"])
def test_every_machines_actor_has_a_bounded_mailbox(name: str) -> None:
    assert 1 <= wiring().mailbox(name).size <= 4096
