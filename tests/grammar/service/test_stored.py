"""Service and store together: what a second start finds, what damage does, what a killed worker leaves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import anyio
import pytest

from engine.errors import GrammarFailed, GrammarTimedOut
from engine.fsm.owners import ROOT
from engine.grammar import worker_job
from engine.grammar.compiler import Compiler, whole_library
from engine.grammar.key import GrammarKey
from engine.grammar.ledger import ENTRY, TEMPORARY
from engine.grammar.store import Store
from engine.grammar.worker import scope_of
from engine.grammar.worker_job import Finished, Job, Outcome
from tests.grammar.service.stage import (
    Running,
    endless,
    patient,
    running,
    strings,
    vocabulary,
    wide,
    word,
)
from tests.grammar.service.test_service import serve, together


@cache
def compiler() -> Compiler:
    return Compiler(vocabulary(), whole_library())


def store_in(root: Path) -> Store:
    return Store(root, scope_of(vocabulary()), 1 << 24)


def test_a_second_start_finds_what_the_first_has_compiled(tmp_path: Path) -> None:
    keys = [strings("a"), word("b"), wide(120)]

    async def first(found: Running) -> None:
        for key in keys:
            assert await found.source(key) == "compile"
        await found.finished(3)
        figures = found.service.figures()
        assert figures["grammar_disk_cache_bytes"] > 0
        assert figures['grammar_resolutions_total{source="compile"}'] == 3

    async def second(found: Running) -> None:
        sources = {await found.source(key) for key in keys}
        assert sources <= {"disk", "local_compile_marker"}
        assert "local_compile_marker" in sources
        assert "compile" not in found.service.counters.phases

    serve(patient(), first, tmp_path)
    serve(patient(), second, tmp_path)


def test_two_servers_compile_a_key_once_between_them(tmp_path: Path) -> None:
    keys = [word(f"w{number}") for number in range(20)]
    compiled: list[int] = []

    async def main() -> None:
        limits = patient(workers=1)
        async with running(limits, tmp_path) as one, running(limits, tmp_path) as other:

            async def ask(found: Running, key: GrammarKey) -> None:
                await found.source(key)

            await together([lambda f=f, k=k: ask(f, k) for k in keys for f in (one, other)])  # type: ignore[misc]
            # One that is always a little behind finds every key on the disk.
            phases = [found.service.counters.phases for found in (one, other)]
            compiled.extend(own["compile"].count for own in phases if "compile" in own)

    anyio.run(main, backend="asyncio")
    assert sum(compiled) == len(keys)


def test_a_damaged_entry_is_its_requests_failure_and_stays(tmp_path: Path) -> None:
    key = word("w")

    async def first(found: Running) -> None:
        await found.source(key)
        await found.finished(1)

    async def second(found: Running) -> None:
        for _ in range(2):
            with pytest.raises(GrammarFailed, match="can't be trusted"):
                await found.source(key)
        assert await found.source(word("other")) == "compile"
        assert found.service.figures()['grammar_disk_errors_total{kind="corrupt"}'] == 2
        assert found.counts["corrupt"] == 2

    serve(patient(), first, tmp_path)
    (entry,) = tmp_path.glob(f"*/*{ENTRY}")
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 4
    entry.write_bytes(data)
    serve(patient(), second, tmp_path)
    assert entry.read_bytes() == data


def test_workers_killed_at_their_deadline_or_by_a_stranger_leave_a_sound_store(tmp_path: Path) -> None:
    """A killed worker may lose the one marker that was on its way, and nothing else."""
    ends: list[int] = []

    async def act(found: Running) -> None:
        async def kill() -> None:
            for _ in range(8):
                await anyio.sleep(0.15)  # At whatever moment of a worker.
                for worker in list(found.service.pool.running.values())[:1]:
                    os.kill(worker.child.process.pid, signal.SIGKILL)
            await found.until(lambda: len(answered) >= 40)
            while len(answered) < len(keys):
                found.expire()
                await anyio.sleep(0.05)

        async def ask(key: GrammarKey) -> None:
            try:
                await found.source(key)
            except (GrammarFailed, GrammarTimedOut):
                failed.append(key)
            answered.append(key)

        failed: list[GrammarKey] = []
        answered: list[GrammarKey] = []
        keys = [endless(1), *(strings(f"s{number}") for number in range(40)), endless(2)]
        await together([kill, *(lambda key=key: ask(key) for key in keys)])
        assert failed
        for number in range(40):
            await found.source(strings(f"s{number}"))
        await found.until(lambda: not any(worker.owed for worker in found.service.pool.workers))
        assert not found.service.counters.disk_errors
        ends.append(sum(found.service.counters.worker_ends.values()))

    serve(patient(workers=2), act, tmp_path)
    store = store_in(tmp_path)
    found = [artifact for number in range(40) if (artifact := store.read(strings(f"s{number}"))) is not None]
    assert 40 - len(found) <= ends[0]
    for artifact in found:
        assert compiler().probe(compiler().load(artifact)) == artifact.probe
    assert store.total_bytes() == sum(path.stat().st_size for path in tmp_path.glob(f"*/*{ENTRY}"))


def job(root: Path, key: GrammarKey) -> tuple[Outcome, Finished]:
    """One key as in a worker."""
    found = Job(compiler(), store_in(root))
    outcome = found.run(key.wire())
    found.mark()
    return outcome, found.finish()


def serial_forms_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was measured."""
    monkeypatch.setattr(worker_job, "LEAST_COMPILE_S", 0.0)
    monkeypatch.setattr(worker_job, "SERIALIZE_SHARE", 1e6)
    monkeypatch.setattr(worker_job, "LOAD_SHARE", 1e6)


def test_the_serial_form_is_kept_where_loading_it_was_measured_to_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serial_forms_pay(monkeypatch)
    outcome, finished = job(tmp_path, strings("a"))
    assert outcome.artifact is not None
    assert (outcome.source, outcome.artifact.payload) == ("compile", b"")  # The answer doesn't wait for it.
    assert outcome.seconds.keys() == {"lock", "read", "compile"}
    assert finished.seconds.keys() == {"serialize", "deserialize", "publish"}
    again, _ = job(tmp_path, strings("a"))
    assert again.artifact is not None
    assert again.source == "disk"
    assert again.artifact.payload
    assert again.artifact.load_s > 0
    assert again.artifact.probe == outcome.artifact.probe
    assert compiler().probe(compiler().load(again.artifact)) == outcome.artifact.probe
    monkeypatch.setattr(worker_job, "LOAD_SHARE", 0.0)
    job(tmp_path, strings("b"))
    again, _ = job(tmp_path, strings("b"))
    assert again.source == "local_compile_marker"
    assert again.artifact is not None
    assert compiler().probe(compiler().load(again.artifact)) == again.artifact.probe


def test_a_grammar_that_is_larger_than_any_serial_form_that_is_kept_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it may take gigabytes, and the worker."""
    serial_forms_pay(monkeypatch)
    size = compiler().compile(strings("a")).memory_size_bytes()
    monkeypatch.setattr(worker_job, "MOST_RAW_BYTES", size - 1)
    outcome, finished = job(tmp_path, strings("a"))
    assert outcome.artifact is not None
    assert outcome.artifact.memory_bytes == size
    assert "serialize" not in finished.seconds
    assert not finished.retires
    again, _ = job(tmp_path, strings("a"))
    assert again.source == "local_compile_marker"


def test_a_serial_form_that_takes_too_long_to_make_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker is in the store before anything else is tried, and the worker that is still busy retires."""
    monkeypatch.setattr(worker_job, "SERIALIZE_SHARE", 0.01)
    outcome, finished = job(tmp_path, wide(400))
    assert finished.retires
    assert store_in(tmp_path).read(wide(400)) == outcome.artifact
    for thread in threading.enumerate():
        if thread.name == "serialize":
            thread.join()

    async def act(found: Running) -> None:
        # Where the host stands still within a compile, that seems to take as long as the serial form.
        for number in range(3):
            assert await found.source(wide(401 + number)) == "compile"
            assert await found.source(word(f"after{number}")) == "compile"
            await found.finished(2 * (number + 1))
            if found.service.counters.worker_ends["retired"]:
                break
        assert found.service.counters.worker_ends["retired"] == 1
        assert not found.reports

    serve(patient(), act, tmp_path)


def test_a_burst_of_keys_is_answered_before_the_disk_gets_their_serial_forms(tmp_path: Path) -> None:
    keys = [strings(f"s{number}") for number in range(64)]

    async def act(found: Running) -> None:
        finished: list[int] = []

        async def ask(key: GrammarKey) -> None:
            assert await found.source(key) == "compile"
            finished.append(found.service.counters.finished)

        await together([lambda key=key: ask(key) for key in keys])  # type: ignore[misc]
        # One may slip in where the host stands still between two jobs.
        assert max(finished) < 8
        await found.finished(64)

    serve(patient(workers=1), act, tmp_path)
    store = store_in(tmp_path)
    assert all(store.read(key) is not None for key in keys)


def test_a_worker_imports_no_torch() -> None:
    code = (
        "import sys, engine.grammar.worker as worker; worker.native_part();"
        "print([name for name in ('torch', 'transformers') if sys.modules.get(name)])"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_full_disk_costs_entries_and_neither_requests_nor_workers(tmp_path: Path) -> None:
    """A limit on the size of files stands for a disk that takes nothing more, not even over what is there."""

    def has_room(found: Running, room: int) -> None:
        for worker in found.service.pool.workers:
            resource.prlimit(worker.child.process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    def entries() -> int:
        return len(list(tmp_path.glob(f"*/*{ENTRY}")))

    async def act(found: Running) -> None:
        await found.source(word("before"))
        await found.finished(1)
        for round_, room in enumerate((0, 100)):
            has_room(found, room)
            keys = [word(f"{'ab'[round_]}{number}") for number in range(4)]
            await together([lambda key=key: compiled(found, key) for key in keys])
            await found.finished(1 + 4 * (round_ + 1))
        assert entries() == 1
        assert not list(tmp_path.glob(f"*/*{TEMPORARY}"))
        assert found.service.counters.disk_errors["io"] >= 8
        has_room(found, resource.RLIM_INFINITY)
        assert await found.source(word("before")) == "local_compile_marker"
        await compiled(found, word("after"))
        await found.finished(11)
        assert entries() == 2
        assert not found.service.counters.worker_ends

    async def compiled(found: Running, key: GrammarKey) -> None:
        assert await found.source(key) == "compile"

    serve(patient(workers=2, cache_entries=1), act, tmp_path)
    assert store_in(tmp_path).total_bytes() == sum(p.stat().st_size for p in tmp_path.glob(f"*/*{ENTRY}"))
