"""The grammar store: every byte is vouched for, limits hold, and writers may be killed at any point."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import StoreCorrupt, StoreUnusable
from engine.fsm.owners import ROOT
from engine.grammar.ledger import ENTRY, LOCK, TEMPORARY, Ledger
from engine.grammar.store import Store
from engine.messages import GrammarArtifact
from tests.grammar.store.writer import KEYS, SCOPE, artifact_of, key_of

LIMIT = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", SCOPE, LIMIT)


def put(store: Store, number: int, size: int) -> bool:
    key = key_of(number)
    with store.locked(key):
        return store.publish(artifact_of(key, size), key)


def there(store: Store) -> set[int]:
    return {number for number in range(KEYS) if store.path(key_of(number)).exists()}


def test_what_is_published_is_read_back_by_another_process_object(store: Store, tmp_path: Path) -> None:
    assert store.read(key_of(1)) is None
    assert put(store, 1, 1000)
    marker = GrammarArtifact(key_of(2).wire(), b"", 0, b"q" * 32, 77, 0.001, 0.0)
    assert store.publish(marker, key_of(2))
    other = Store(tmp_path / "store", SCOPE, LIMIT)
    assert other.read(key_of(1)) == artifact_of(key_of(1), 1000)
    assert other.read(key_of(2)) == marker
    assert other.total_bytes() == sum(
        path.stat().st_size for path in (tmp_path / "store").glob(f"*/*{ENTRY}")
    )


def test_every_byte_of_an_entry_is_vouched_for(store: Store) -> None:
    """Each byte altered in two ways, and each shorter and one longer length."""
    key = key_of(1)
    put(store, 1, 40)
    path = store.path(key)
    whole = path.read_bytes()
    damaged = [
        whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
        for at in range(len(whole))
        for flip in (1, 128)
    ]
    damaged += [whole[:length] for length in range(len(whole))] + [whole + b"\0"]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(StoreCorrupt):
            store.read(key)
        assert path.read_bytes() == data  # It is kept for inspection.
    assert store.errors == {"corrupt": len(damaged)}
    path.write_bytes(whole)
    assert store.read(key) == artifact_of(key, 40)


def test_an_entry_in_another_ones_place_is_refused(store: Store, tmp_path: Path) -> None:
    put(store, 1, 40)
    store.path(key_of(2)).write_bytes(store.path(key_of(1)).read_bytes())
    with pytest.raises(StoreCorrupt, match="another key"):
        store.read(key_of(2))
    assert store.errors == {"scope": 1}
    elsewhere = Store(tmp_path / "store", "another vocabulary", LIMIT)
    assert elsewhere.read(key_of(1)) is None
    elsewhere.path(key_of(1)).write_bytes(store.path(key_of(1)).read_bytes())
    with pytest.raises(StoreCorrupt):
        elsewhere.read(key_of(1))


def test_the_least_recently_used_goes_first_and_nothing_that_is_locked(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", SCOPE, 10_000)
    for number in range(8):
        assert put(store, number, 900)
        os.utime(store.path(key_of(number)), ns=(number * 10**9, number * 10**9))
    assert there(store) == set(range(8))
    assert store.read(key_of(0)) is not None  # Now it is the most recent one.
    with store.locked(key_of(1)):
        assert put(store, 8, 2500)
    assert there(store) == {0, 1, 4, 5, 6, 7, 8}
    assert store.total_bytes() <= 10_000
    assert store.pruned == 2
    assert store.prune_s > 0
    assert not list((tmp_path / "store").glob(f"*/*{key_of(2).digest}*"))  # Its lock went with it.


def test_what_fits_nowhere_is_counted_and_leaves_the_rest(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", SCOPE, 3_000)
    assert put(store, 1, 900)
    assert not put(store, 2, 5_000)
    with store.locked(key_of(1)):
        assert not put(store, 3, 2_500)
    assert there(store) == {1}
    assert store.errors == {"over_limit": 2}
    assert not list((tmp_path / "store").glob(f"*/*{TEMPORARY}"))


def test_entries_of_older_scopes_count_and_are_pruned(tmp_path: Path) -> None:
    old = Store(tmp_path / "store", "an older library", 4_000)
    assert put(old, 1, 2_000)
    os.utime(old.path(key_of(1)), ns=(1, 1))
    new = Store(tmp_path / "store", SCOPE, 4_000)
    assert put(new, 1, 2_000)
    assert not old.path(key_of(1)).exists()


def test_a_key_without_an_entry_leaves_no_lock(store: Store, tmp_path: Path) -> None:
    with store.locked(key_of(1)):
        assert list((tmp_path / "store").glob(f"*/*{LOCK}"))
    assert not list((tmp_path / "store").glob(f"*/*{LOCK}"))


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "store"
    Store(root, SCOPE, LIMIT)
    root.chmod(0o770)
    with pytest.raises(StoreUnusable, match="0o770"):
        Store(root, SCOPE, LIMIT)
    root.chmod(0o700)
    (root / "secret").chmod(0o644)
    with pytest.raises(StoreUnusable, match="secret"):
        Store(root, SCOPE, LIMIT)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="can't be used"):
        Store(tmp_path / "file", SCOPE, LIMIT)


def test_a_full_disk_is_counted_and_nothing_half_written_is_left(tmp_path: Path) -> None:
    root = tmp_path / "store"
    told = run("full", str(root)).stdout
    assert told.splitlines() == ["True False", "None {'io': 1}"]
    assert not list(root.glob(f"*/*{TEMPORARY}"))
    assert Store(root, SCOPE, LIMIT).read(key_of(1)) is not None


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.grammar.store.writer", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100)


def test_writers_that_are_killed_at_any_point_leave_a_sound_store(tmp_path: Path) -> None:
    """Three at a time over few keys and a tight limit: they write, read, prune and meet all the time."""
    root, limit, chance = tmp_path / "store", 20_000, random.Random(7)
    running: list[subprocess.Popen[bytes]] = []
    output = (tmp_path / "read").open("wb")

    def start(seed: int) -> None:
        command = [sys.executable, "-m", "tests.grammar.store.writer", str(root), str(limit), str(seed)]
        running.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE))

    for seed in range(3):
        start(seed)
    killed, read = 0, tmp_path / "read"
    while killed < 15:
        grown = read.stat().st_size
        wait_for(lambda grown=grown: read.stat().st_size > grown)  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.3))
        victim = running.pop(chance.randrange(3))
        assert victim.poll() is None, victim.stderr.read().decode() if victim.stderr else ""
        end(victim)
        killed += 1
        start(100 + killed)
    for process in running:
        end(process)
    output.close()
    with Ledger(root, limit).change() as change:
        counted = change.total
    store = Store(root, SCOPE, limit)
    for number in there(store):
        found = store.read(key_of(number))
        assert found == artifact_of(key_of(number), len(found.payload) if found else 0)
    assert read.stat().st_size > 20
    assert len(there(store)) > 1
    assert not list(root.glob(f"*/*{TEMPORARY}"))
    actual = sum(path.stat().st_size for path in root.glob(f"*/*{ENTRY}"))
    assert counted == store.total_bytes() == actual <= limit


def wait_for(true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_count_that_was_left_in_change_or_damaged_is_made_anew(store: Store, tmp_path: Path) -> None:
    put(store, 1, 1000)
    ledger = tmp_path / "store" / "ledger"
    true = store.total_bytes()
    for at in range(len(ledger.read_bytes())):
        data = bytearray(ledger.read_bytes())
        data[at] ^= 1
        ledger.write_bytes(bytes(data))
        assert store.total_bytes() == true
