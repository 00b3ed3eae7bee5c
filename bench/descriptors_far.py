"""The other process of `bench descriptors`: receives memory, looks at it, writes into it, and tells."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from bench.descriptors import WITHIN_S, layout_of
from engine.errors import DescriptorError
from engine.transport.connections import Connection, Identity, connect
from engine.transport.descriptors import accept
from engine.transport.memory import HostImporter


def host(order: dict[str, Any], end: Connection) -> dict[str, Any]:
    """Batches of host memory; the regions are filled with their number."""
    layout, wrong = layout_of(order["layout"]), 0
    for _ in range(order["batches"]):
        regions = accept(end, layout, HostImporter(), WITHIN_S)
        for index, region in enumerate(regions):
            first = region.array("uint8", (region.nbytes,))[[0, -1]].tolist()
            wrong += first != [index + 1, index + 1]
        regions.close()
    return {"wrong": wrong}


def device(order: dict[str, Any], end: Connection) -> dict[str, Any]:
    """Device memory: read and written from both GPUs, timed, and given back."""
    from bench.descriptors_cuda import importer, look_and_write

    layout, maker = layout_of(order["layout"]), importer()
    print(json.dumps({"ready": True}), flush=True)
    opened, begun_ns = len(os.listdir("/proc/self/fd")), time.perf_counter_ns()
    regions = accept(end, layout, maker, WITHIN_S)
    took_ms = (time.perf_counter_ns() - begun_ns) / 1e6
    while_mapped = len(os.listdir("/proc/self/fd")) - opened
    told = look_and_write(regions)
    regions.close()
    opened = len(os.listdir("/proc/self/fd"))
    return {**told, "accept_ms": took_ms, "while_mapped": while_mapped, "opened": opened}


def refuse(order: dict[str, Any], end: Connection) -> dict[str, Any]:
    """Device memory that should be refused: the error's name and text."""
    from bench.descriptors_cuda import importer

    maker = importer()
    opened = len(os.listdir("/proc/self/fd")) - 1  # without the connection, which the refusal closes
    try:
        accept(end, layout_of(order["layout"]), maker, WITHIN_S).close()
    except DescriptorError as error:
        left = len(os.listdir("/proc/self/fd")) - opened
        return {"error": type(error).__name__, "text": str(error), "descriptors_left": left}
    return {"error": None, "text": "", "descriptors_left": 0}


JOBS = {"host": host, "device": device, "refuse": refuse}


def main() -> None:
    """Orders until standard input ends."""
    path, session, pid, ticks = sys.argv[1:]
    for line in sys.stdin:
        order = json.loads(line)
        with connect(path, bytes.fromhex(session), 1, 0, Identity(int(pid), int(ticks)), WITHIN_S) as end:
            print(json.dumps(JOBS[order["job"]](order, end)), flush=True)


if __name__ == "__main__":
    main()
