"""Two real processes: the memory of one in the other, bit for bit; or one named error, and nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine import errors
from engine.errors import DescriptorError
from engine.transport import Kind, Layout
from engine.transport.connections import Connection, Identity, Rendezvous, connect, identity_of
from engine.transport.descriptors import accept, frame_of, offer
from engine.transport.memory import PAGE_BYTES, HostImporter, HostRegion
from tests.transport.faults import SOON_S, put
from tests.transport.peer import fill, held, holds
from tests.transport.peers import SESSION, Peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
PAGES = ((0, 3), (4, 1), (8, 2))
"""Offset and size of each span, in pages; there are gaps."""

LAYOUT = Layout(
    Kind.MEMFD, tuple((o * PAGE_BYTES, n * PAGE_BYTES) for o, n in PAGES), 10 * PAGE_BYTES, PAGE_BYTES, 5
)
OFFERS = {
    "checksum": "Frame",
    "magic": "Frame",
    "short": "Frame",
    "long": "Frame",
    "one byte": "Frame",
    "version": "Version",
    "session": "Session",
    "from another rank": "Session",
    "for another rank": "Session",
    "generation": "Generation",
    "kind": "Kind",
    "device": "Device",
    "count": "Count",
    "index twice": "Duplicate",
    "index left out": "Count",
    "size": "Size",
    "pool": "Size",
    "misaligned": "Span",
    "overlap": "Span",
    "outside": "Span",
    "moved": "Span",
    "huge": "Span",
    "other pid": "PeerReplaced",
    "other start": "PeerReplaced",
    "none": "Count",
    "two": "Count",
    "most": "Count",
    "same memory": "Duplicate",
    "same descriptor": "Duplicate",
    "pipe": "Kind",
    "disk": "Kind",
    "unsealed": "Unsealed",
    "may grow": "Unsealed",
    "may shrink": "Unsealed",
    "read-only": "Unsealed",
    "smaller": "Size",
    "larger": "Size",
    "close": "Closed",
    "silence": "Timeout",
    "kill": "PeerDead",
    "child": "PeerReplaced",
    "tells": "Count",
}
"""By what the offering end does wrong: the error of the receiving one, less `Descriptor`."""

LATER = {"index twice": 1, "overlap": 1, "same memory": 2, "same descriptor": 2}
"""Faults that need frames before theirs."""

KILLED = {"close", "kill"}
"""Faults after which the far end is killed, by the test or by itself."""

TEXTS = {
    "misaligned": "not in multiples of",
    "overlap": "spans overlap",
    "outside": "ends beyond its pool",
    "huge": "ends beyond its pool",
    "moved": "is at .* not at",
    "size": "span . has .* bytes, not",
    "smaller": "were declared",
    "index twice": "came twice",
    "same memory": "bring the same memory",
}
"""Where one class has several causes: what the message says of this one."""

ANSWERS = {
    "kill": "PeerDead",
    "close": "Closed",
    "silence": "Timeout",
    "unknown code": "Frame",
    "stale answer": "Generation",
    "fewer": "Generation",
    "no answer": "Frame",
    "gift": "Frame",
    "stranger's answer": "Session",
}


@pytest.fixture(scope="module")
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


@pytest.fixture
def regions() -> Iterator[list[HostRegion]]:
    made = [HostRegion.create(size) for _, size in LAYOUT.spans]
    for index, region in enumerate(made):
        fill(region, index)
    yield made
    for region in made:
        region.close()


@pytest.fixture(autouse=True)
def _nothing_left(peers: Peers, regions: list[HostRegion]) -> Iterator[None]:
    before = held()
    yield
    assert held() == before


def end_of(end: Connection, fault: str) -> None:
    """Kills a far end that lives on only to be seen alive."""
    if fault == "close":
        os.kill(end.peer.pid, signal.SIGKILL)


def named(name: str) -> type[DescriptorError]:
    return vars(errors)[f"Descriptor{name}"]


def test_what_one_process_writes_another_one_reads_and_back(peers: Peers, regions: list[HostRegion]) -> None:
    with peers.meeting("accept", LAYOUT, batches=3) as end:
        for _ in range(3):
            offer(end, LAYOUT, regions, SOON_S)
        told = peers.result()
    assert (told["error"], told["leaked"], told["exit"]) == (None, [], 0), told
    assert all(holds(region, 100 + i) for i, region in enumerate(regions))


def test_a_received_descriptor_is_closed_on_exec(peers: Peers) -> None:
    with peers.meeting("offer", LAYOUT, fault="close", at=1) as end:
        frame, descriptors = end.receive(time.monotonic() + SOON_S)
        assert (frame.index, frame.size) == (0, LAYOUT.spans[0][1])
        assert [os.get_inheritable(descriptor) for descriptor in descriptors] == [False]
        os.close(descriptors[0])
        end_of(end, "close")
        peers.result()


def test_received_memory_outlives_its_maker(peers: Peers) -> None:
    who = peers.begin("offer", LAYOUT)
    with peers.meet(who) as end:
        received = accept(end, LAYOUT, HostImporter(), SOON_S)
    os.kill(who.pid, signal.SIGKILL)
    assert peers.result()["exit"] == -signal.SIGKILL
    assert all(holds(region, i) for i, region in enumerate(received))
    with pytest.raises(errors.DescriptorClosed, match="handed on by who made it"):
        received[0].export()
    received.close()
    received.close()


@pytest.mark.parametrize("fault", OFFERS)
def test_a_faulty_offer_is_one_named_error_on_both_sides(peers: Peers, fault: str) -> None:
    within_s = 0.3 if fault == "silence" else SOON_S
    at = LATER.get(fault, len(OFFERS[fault]) % len(PAGES))
    with peers.meeting("offer", LAYOUT, fault=fault, at=at) as end:
        with pytest.raises(named(OFFERS[fault])) as failed:
            accept(end, LAYOUT, HostImporter(), within_s)
        with pytest.raises(errors.DescriptorClosed, match="this end is closed"):
            end.receive(time.monotonic() + 1)
        end_of(end, fault)
        told = peers.result()
    assert type(failed.value) is named(OFFERS[fault])
    assert failed.value.rank == (1 if fault == "tells" else 0)
    assert re.search(TEXTS.get(fault, ""), str(failed.value)), failed.value
    if fault in KILLED:
        assert told == {"exit": -signal.SIGKILL}
        return
    assert told["exit"] == 0
    assert told["leaked"] == [], told
    if fault != "silence":
        assert (told["error"], told["by"]) == (type(failed.value).__name__, failed.value.rank), told


@pytest.mark.parametrize("fault", ANSWERS)
def test_a_faulty_answer_is_a_named_error(peers: Peers, regions: list[HostRegion], fault: str) -> None:
    within_s = 0.3 if fault == "silence" else SOON_S
    with peers.meeting("accept", LAYOUT, fault=fault, at=len(PAGES)) as end:
        with pytest.raises(DescriptorError) as failed:
            offer(end, LAYOUT, regions, within_s)
        end_of(end, fault)
        told = peers.result()
    assert type(failed.value) is named(ANSWERS[fault]), failed.value
    assert told["exit"] == (-signal.SIGKILL if fault in KILLED else 0)


@pytest.mark.parametrize("at", range(len(PAGES)))
def test_a_receiver_that_leaves_early_is_found(peers: Peers, regions: list[HostRegion], at: int) -> None:
    for fault in ("kill", "close"):
        with peers.meeting("accept", LAYOUT, fault=fault, at=at) as end:
            with pytest.raises(DescriptorError) as failed:
                offer(end, LAYOUT, regions, SOON_S)
            end_of(end, fault)
            peers.result()
        assert type(failed.value) is named(ANSWERS[fault])


def test_a_whole_batch_of_a_dead_process_is_refused_though_its_connection_lives(peers: Peers) -> None:
    with peers.meeting("offer", LAYOUT, fault="orphan", at=len(PAGES)) as end:
        with pytest.raises(errors.DescriptorPeerDead):
            check_without_end(end)
        with pytest.raises(errors.DescriptorPeerDead, match="dead"):
            accept(end, LAYOUT, HostImporter(), SOON_S)
        assert peers.result() == {"exit": -signal.SIGKILL}


def check_without_end(end: Connection) -> None:
    while True:
        end.check_peer()


@pytest.mark.parametrize("unread", [0, 1])
def test_a_refusal_is_heard_though_its_sender_has_left(
    peers: Peers, regions: list[HostRegion], unread: int
) -> None:
    with peers.meeting("accept", replace(LAYOUT, generation=6)) as end:
        put(end, frame_of(end, LAYOUT, 0), [regions[0].export()])
        for _ in range(unread):
            with contextlib.suppress(errors.DescriptorClosed, errors.DescriptorPeerDead):  # it may have left
                put(end, frame_of(end, LAYOUT, 1), [regions[1].export()])
        told = peers.result()
        assert (told["error"], told["leaked"]) == ("DescriptorGeneration", [])
        with pytest.raises(errors.DescriptorGeneration, match="told by rank 1"):
            offer(end, LAYOUT, regions, SOON_S)


def test_a_receiver_that_reads_nothing_is_not_waited_for(peers: Peers, regions: list[HostRegion]) -> None:
    with peers.meeting("accept", LAYOUT, fault="silence", at=0) as end:
        deadline_s = time.monotonic() + 0.4
        with pytest.raises(errors.DescriptorTimeout, match="sending took too long"):
            frames_without_end(end, regions[0], deadline_s)
        end.close()
        peers.result()


def frames_without_end(end: Connection, region: HostRegion, deadline_s: float) -> None:
    while True:
        put(end, frame_of(end, LAYOUT, 0), [region.export()], deadline_s)


def test_a_receiver_that_may_open_no_more_tells_it(peers: Peers, regions: list[HostRegion]) -> None:
    with peers.meeting("accept", LAYOUT, fault="no room") as end:
        with pytest.raises(errors.DescriptorTruncated, match="told by rank 1"):
            offer(end, LAYOUT, regions, SOON_S)
        told = peers.result()
    assert (told["error"], told["by"], told["leaked"]) == ("DescriptorTruncated", 1, []), told


def test_what_is_offered_is_checked_before_anything_is_sent(peers: Peers, regions: list[HostRegion]) -> None:
    odd = HostRegion.create(5 * PAGE_BYTES)
    cases: list[tuple[type[DescriptorError], Layout, list[HostRegion]]] = [
        (errors.DescriptorCount, LAYOUT, regions[:2]),
        (errors.DescriptorDuplicate, LAYOUT, [regions[0], regions[1], regions[0]]),
        (errors.DescriptorSize, LAYOUT, [odd, regions[1], regions[2]]),
        (errors.DescriptorKind, replace(LAYOUT, kind=Kind.CUDA_VMM), regions),
        (errors.DescriptorDevice, replace(LAYOUT, device=b"d" * 16), regions),
    ]
    for kind, layout, offered in cases:
        with peers.meeting("accept", LAYOUT) as end:
            with pytest.raises(kind):
                offer(end, layout, offered, SOON_S)
            told = peers.result()
        assert (told["error"], told["by"], told["leaked"]) == (kind.__name__, 0, []), told
    odd.close()


def batches_without_end(end: Connection, role: str, regions: list[HostRegion]) -> None:
    while True:
        if role == "accept":
            offer(end, LAYOUT, regions, SOON_S)
        else:
            accept(end, LAYOUT, HostImporter(), SOON_S).close()


@pytest.mark.parametrize("role", ["offer", "accept"])
def test_a_kill_at_any_time_is_an_error_in_time(peers: Peers, regions: list[HostRegion], role: str) -> None:
    chance, ends = random.Random(role), []
    for _ in range(12):
        who = peers.begin(role, LAYOUT, batches=1_000_000)
        with peers.meet(who) as end:
            killer = threading.Timer(chance.uniform(0, 0.05), os.kill, (who.pid, signal.SIGKILL))
            killer.start()
            with pytest.raises(DescriptorError) as failed:
                batches_without_end(end, role, regions)
            killer.join()
        ends.append(type(failed.value))
        assert ends[-1] is errors.DescriptorPeerDead, failed.value
        assert peers.result() == {"exit": -signal.SIGKILL}
    assert len(ends) == 12


def test_only_the_expected_process_is_spoken_to(peers: Peers) -> None:
    for change, kind in (
        (lambda who: Identity(os.getpid(), who.start_ticks), errors.DescriptorForeign),
        (lambda who: Identity(who.pid, who.start_ticks + 1), errors.DescriptorPeerReplaced),
    ):
        who = peers.begin("offer", LAYOUT)
        with pytest.raises(kind):
            peers.meet(change(who))
        assert peers.result()["error"] == "DescriptorClosed"
    with pytest.raises(errors.DescriptorPeerDead):
        identity_of(2**22 + 1)


def test_nobody_comes_or_nobody_waits(tmp_path: object) -> None:
    own = identity_of(os.getpid())
    lonely = Rendezvous()
    with pytest.raises(errors.DescriptorTimeout):
        lonely.accept(SESSION, 0, 1, own, 0.02)
    folder = os.path.dirname(lonely.path)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    lonely.close()
    lonely.close()
    assert not os.path.exists(folder)
    with pytest.raises(errors.DescriptorSyscall):
        connect(lonely.path, SESSION, 1, 0, own, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused(peers: Peers) -> None:
    open_door = Rendezvous()
    for path in (os.path.dirname(open_door.path), open_door.path):
        os.chmod(path, 0o777)
    script = (
        "import os, socket, time; os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f"s.connect({open_door.path!r}); time.sleep(300)"
    )
    stranger = os.posix_spawn(sys.executable, [sys.executable, "-c", script], os.environ)
    try:
        with pytest.raises(errors.DescriptorForeign, match="user 65534"):
            open_door.accept(SESSION, 0, 1, identity_of(stranger), SOON_S)
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
        open_door.close()


def test_a_closed_end_and_a_passed_deadline_have_names(peers: Peers) -> None:
    with peers.meeting("accept", LAYOUT, fault="close") as end:
        with pytest.raises(errors.DescriptorTimeout):
            end.receive(time.monotonic() - 1)
        end.close()
        with pytest.raises(errors.DescriptorClosed):
            end.receive(time.monotonic() + 1)
        end_of(end, "close")
        peers.result()
