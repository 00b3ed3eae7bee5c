"""The far end for tests: reads a plan a line, forks a child that carries it out, and tells what came of it.

A plan has `path`, `session`, `peer` (pid, ticks), `role` (offer, accept), `layout`, `batches`, `fault`, `at`
(the frame that has it) and `within_s`. Before the result comes a line with the child's own pid and ticks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from engine.errors import DescriptorError
from engine.transport import Kind, Layout, Region
from engine.transport.connections import Connection, Identity, connect, identity_of
from engine.transport.cuda import Driver
from engine.transport.descriptors import accept, offer
from engine.transport.device import DeviceImporter, DeviceRegion
from engine.transport.memory import HostImporter, HostRegion
from tests.transport.faults import FAULTY, SOON_S, TAKEN, answer


def held() -> list[str]:
    """What this process has open and mapped, but for what a listing itself opens."""
    opened = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = ["map " + line.split(" ", 1)[0] for line in maps if "memfd:engine" in line]
    return sorted(line for line in opened if "/proc/" not in line) + sorted(mapped)


def layout_of(plan: dict[str, Any]) -> Layout:
    """As the plan has it."""
    told = plan["layout"]
    return Layout(
        Kind(told["kind"]),
        tuple((offset, size) for offset, size in told["spans"]),
        told["pool_bytes"],
        told["granularity"],
        told["generation"],
        bytes.fromhex(told["device"]),
    )


def content(region: Any) -> Any:
    """The region's bytes; of the stand-in driver's device memory too, which lies in host memory."""
    if isinstance(region, HostRegion):
        return region.array(np.uint8, (region.nbytes,))
    from tests.transport.standin import bytes_of

    return bytes_of(region)


def fill(region: Any, seed: int) -> None:
    """Bytes that depend on the seed alone."""
    content(region)[:] = np.random.default_rng(seed).integers(0, 256, region.nbytes, dtype=np.uint8)


def holds(region: Any, seed: int) -> bool:
    """Whether it has what `fill` writes."""
    due = np.random.default_rng(seed).integers(0, 256, region.nbytes, dtype=np.uint8)
    return bool((content(region) == due).all())


def make(layout: Layout, driver: Driver | None) -> list[Region]:
    """Regions of the layout, filled by index."""
    regions: list[Region] = []
    for index, (_, size) in enumerate(layout.spans):
        if driver is None:
            regions.append(HostRegion.create(size))
        else:
            regions.append(DeviceRegion.create(driver, size, driver.device_of(layout.device), (0, 1)))
        fill(regions[-1], index)
    return regions


def offers(plan: dict[str, Any], end: Connection, driver: Driver | None) -> None:
    """Offers the layout, with the plan's fault; then waits until the far end has written."""
    layout = layout_of(plan)
    regions = make(layout, driver)
    try:
        if plan["fault"]:
            FAULTY[plan["fault"]](plan, end, layout, regions)
        else:
            for _ in range(plan["batches"]):
                offer(end, layout, regions, plan["within_s"])
        if plan["fault"] is None:
            until_s = time.monotonic() + SOON_S
            while not all(holds(region, 100 + i) for i, region in enumerate(regions)):
                assert time.monotonic() < until_s, "the far end's bytes never came"
                time.sleep(0.002)
    finally:
        for region in regions:
            region.close()


def accepts(plan: dict[str, Any], end: Connection, driver: Driver | None) -> None:
    """Accepts the layout; checks what is in it and writes an answer, or behaves as the fault says."""
    layout, fault = layout_of(plan), plan["fault"]
    if fault == "no room":
        with room_for_one_descriptor():
            accept(end, layout, HostImporter(), plan["within_s"])
    if fault:
        answer(fault, plan, end, layout)
        return
    importer = DeviceImporter(driver, (0, 1)) if driver else HostImporter()
    for batch in range(plan["batches"]):
        regions = accept(end, layout, importer, plan["within_s"])
        assert all(holds(region, i) for i, region in enumerate(regions))
        if batch + 1 == plan["batches"]:
            for i, region in enumerate(regions):
                fill(region, 100 + i)
        regions.close()


@contextlib.contextmanager
def room_for_one_descriptor() -> Iterator[None]:
    """This process may open one more descriptor, not two."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    os.close(taken.pop())
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def carry_out(plan: dict[str, Any], driver: Driver | None) -> dict[str, Any]:
    """What came of it; an error of the transport is a result."""
    before, begun_s, error = held(), time.monotonic(), None
    try:
        session, peer = bytes.fromhex(plan["session"]), Identity(*plan["peer"])
        with connect(plan["path"], session, 1, 0, peer, plan["within_s"]) as end:
            (offers if plan["role"] == "offer" else accepts)(plan, end, driver)
    except DescriptorError as failed:
        error = failed
    took_s = time.monotonic() - begun_s
    # A device's last mapping goes with what the error's traceback still names.
    text, name, by = str(error), type(error).__name__ if error else None, error.rank if error else None
    error = None
    after = held()
    leaked = [line for line in after if line not in before]
    return {"error": name, "by": by, "text": text, "leaked": leaked, "took_s": took_s}


def main() -> None:
    """Plans until standard input ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {TAKEN})
    library = sys.argv[1] if len(sys.argv) > 1 else None
    print("ready", flush=True)
    for line in sys.stdin:
        plan = json.loads(line)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            result = carry_out(plan, Driver(library) if library else None)
            os.write(tell, json.dumps(result).encode())
            os._exit(0)
        os.close(tell)
        print(json.dumps([child, identity_of(child).start_ticks]), flush=True)
        with open(told, "rb") as pipe:
            result = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({**(json.loads(result) if result else {}), "exit": status}), flush=True)


if __name__ == "__main__":
    main()
