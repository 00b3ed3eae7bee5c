"""What the system says of the server's processes: memory, descriptors, threads, children, shared memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError

PROC = Path("/proc")
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One process at one moment; memory in MiB.

    own_mib  of rss_mib what is no file's: pages of files come and go with the host's needs
    shared   shared-memory objects that it maps
    """

    name: str
    pid: int
    rss_mib: float
    own_mib: float
    descriptors: int
    threads: int
    shared: tuple[str, ...]


def tree(pid: int) -> dict[int, int]:
    """The process and all below it: id -> start time in ticks, which tells a reused id apart."""
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        started = started_ticks(one)
        if started is None:
            continue
        found[one] = started
        for task in _names(PROC / str(one) / "task"):
            try:
                text = (PROC / str(one) / "task" / task / "children").read_text()
            except OSError:
                continue
            waiting += [int(child) for child in text.split()]
    return found


def started_ticks(pid: int) -> int | None:
    """When a process started; None where there is none, or a dead one that nobody has waited for."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def name_of(pid: int) -> str:
    """What a process does, in few words."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "ended"
    for word, name in (("rank", "rank"), ("serve", "api"), ("resource_tracker", "tracker")):
        if any(word == one or (word in one and " " in one) for one in words):
            return name
    return "worker"


def usage(pid: int, name: str) -> Usage | None:
    """Figures of a process; None where it has ended meanwhile."""
    folder = PROC / str(pid)
    try:
        status = _fields(folder / "status")
        maps = (folder / "maps").read_text()
    except OSError:
        return None
    lines = [line for line in maps.splitlines() if "/dev/shm/" in line or "/memfd:" in line]
    shared = sorted({line.split(None, 5)[-1] for line in lines})
    return Usage(
        name,
        pid,
        rss_mib=status.get("VmRSS", 0) / 1024,
        own_mib=(status.get("RssAnon", 0) + status.get("RssShmem", 0)) / 1024,
        descriptors=len(_names(folder / "fd")),
        threads=status.get("Threads", 0),
        shared=tuple(shared),
    )


def descriptors(pid: int) -> list[str]:
    """What the open descriptors are."""
    found = []
    for one in _names(PROC / str(pid) / "fd"):
        try:
            found.append(os.readlink(PROC / str(pid) / "fd" / one))
        except OSError:
            continue
    return sorted(found)


def owner_of(port: int) -> int:
    """The process that listens on a port of this host. raises ConfigError where none can be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for pid in filter(str.isdigit, _names(PROC)):
        if inodes & set(descriptors(int(pid))):
            return int(pid)
    raise ConfigError(f"no process of this host that this user may look into listens on port {port}")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """Lines `Name:  number ...`."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found
