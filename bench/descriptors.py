"""`python -m engine bench descriptors`: memory of one process in another one, by descriptors.

Host memory always; with `--device cuda` also device memory between the first two GPUs: this process makes it
on GPU 0, another one maps it, reads and writes it from GPU 1 and from GPU 0, bit for bit, and refuses what it
should. `*_batch_*`: from the call of `offer` until the other process has checked and mapped all and said so.
`device_copy_gbs_by_gpu`: 256 MiB copied out of the shared memory by kernels of that GPU.

Fails on a wrong bit, a descriptor left open, device memory that isn't given back, and what should have been
refused and wasn't.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.transport import NO_DEVICE, Kind, Layout, Region
from engine.transport.connections import Identity, Rendezvous, identity_of
from engine.transport.descriptors import offer
from engine.transport.memory import HostRegion

REGIONS, REGION_BYTES, BATCHES, WARM_UP = 16, 1 << 20, 300, 20
WITHIN_S = 20.0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of host memory, and of device memory with `--device cuda`. raises RuntimeError, ConfigError."""
    figures: dict[str, Any] = {}
    with Far() as far:
        figures |= host(far, BATCHES // 10 if args.quick else BATCHES)
        if args.device == "cuda":
            from bench.descriptors_cuda import device

            figures |= device(far)
    return figures


def host(far: Far, batches: int) -> dict[str, float]:
    """Batches of REGIONS regions, each time mapped and unmapped by the other process."""
    size = REGION_BYTES
    spans = tuple((index * size, size) for index in range(REGIONS))
    layout = Layout(Kind.MEMFD, spans, REGIONS * size, 4096)
    regions = [HostRegion.create(size) for _ in spans]
    opened = len(os.listdir("/proc/self/fd"))
    for index, region in enumerate(regions):
        region.array("uint8", (size,))[:] = index + 1
    taken = []
    with far.meeting("host", layout, batches=WARM_UP + batches) as end:
        for _ in range(WARM_UP + batches):
            begun_ns = time.perf_counter_ns()
            offer(end, layout, regions, WITHIN_S)
            taken.append((time.perf_counter_ns() - begun_ns) / 1e3)
    told = far.answer()
    if told["wrong"] or len(os.listdir("/proc/self/fd")) != opened:
        raise RuntimeError(f"wrong bytes, or descriptors left open: {told}")
    close(regions)
    taken = sorted(taken[WARM_UP:])
    return {
        "host_regions": REGIONS,
        "host_batch_p50_us": round(statistics.median(taken), 1),
        "host_batch_p99_us": round(taken[len(taken) * 99 // 100], 1),
    }


def close(regions: Sequence[Region]) -> None:
    """The last first."""
    for region in reversed(regions):
        region.close()


class Far:
    """The other process, and how it is reached."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous()
        self._session = secrets.token_bytes(16)
        own = identity_of(os.getpid())
        command = [sys.executable, "-m", "bench.descriptors_far", self._rendezvous.path, self._session.hex()]
        self._process = subprocess.Popen(
            [*command, str(own.pid), str(own.start_ticks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._who = Identity(self._process.pid, identity_of(self._process.pid).start_ticks)

    def __enter__(self) -> Far:
        return self

    def __exit__(self, *_: object) -> None:
        self._rendezvous.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def meeting(self, job: str, layout: Layout, **more: Any) -> Iterator[Any]:
        """A new connection, over which the other process does `job` with the layout."""
        told = [int(layout.kind), layout.spans, layout.pool_bytes, layout.granularity, layout.device.hex()]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "layout": told, **more}) + "\n")
        self._process.stdin.flush()
        with self._rendezvous.accept(self._session, 0, 1, self._who, 3 * WITHIN_S) as end:
            yield end

    def answer(self) -> dict[str, Any]:
        """What the other process says of its job."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the other process has ended")
        return dict(json.loads(line))


def layout_of(told: Sequence[Any]) -> Layout:
    """As Far.meeting tells it."""
    kind, spans, pool_bytes, granularity, device = told
    pairs = tuple((offset, size) for offset, size in spans)
    return Layout(Kind(kind), pairs, pool_bytes, granularity, 0, bytes.fromhex(device) or NO_DEVICE)
