"""The device part of `bench descriptors`: two GPUs, two processes, one memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench.descriptors import WITHIN_S, Far, close
from engine.errors import ConfigError, CudaCallFailed, DescriptorError, RegionInUse
from engine.transport import Kind, Layout, Region
from engine.transport.cuda import Driver
from engine.transport.descriptors import Regions, offer
from engine.transport.device import DeviceImporter, DeviceRegion
from engine.transport.memory import HostRegion
from engine.transport.tensors import device_tensor

MIB = 1 << 20
SIZES = (2 * MIB, 64 * MIB, 256 * MIB)
"""Multiples of the granularity of every device that has such memory so far (2 MiB)."""

COPIES = 7
DEVICES = (0, 1)


@cache
def driver() -> Driver:
    """This process's driver."""
    return Driver()


def importer() -> DeviceImporter:
    """For both GPUs; the contexts are made here, before any time is taken."""
    if torch.cuda.device_count() < len(DEVICES):
        raise ConfigError(f"two NVIDIA devices are needed, here are {torch.cuda.device_count()}")
    for number in DEVICES:
        torch.zeros(1, device=f"cuda:{number}").item()
    return DeviceImporter(driver(), DEVICES)


def pattern(words: int, seed: int, on: int) -> Tensor:
    """int32 [words], other ones for each seed; computed on GPU `on`."""
    ids = torch.arange(words, dtype=torch.int64, device=f"cuda:{on}")
    return ((ids + 1) * 2_654_435_761 + seed * 40_503).to(torch.int32)


def words(region: DeviceRegion, on: int) -> Tensor:
    """The whole region as int32, for kernels of GPU `on`."""
    return device_tensor(region, on, torch.int32, (region.nbytes // 4,))


def wait(on: int) -> None:
    """Until GPU `on` has done what it was told."""
    torch.cuda.current_stream(on).synchronize()


def look_and_write(regions: Regions[DeviceRegion]) -> dict[str, Any]:
    """Wrong words by GPU that read; then GPU 1 writes the first half of each region and GPU 0 the second."""
    told: dict[str, Any] = {"wrong": {}, "copy_gbs": {}}
    for on in DEVICES:
        wrong = 0
        for seed, region in enumerate(regions):
            seen = words(region, on)
            assert seen.device == torch.device("cuda", on)
            wrong += int((seen != pattern(seen.numel(), seed, on)).sum())
        told["wrong"][on] = wrong
        told["copy_gbs"][on] = copy_gbs(words(regions[-1], on), on)
    for seed, region in enumerate(regions):
        for on, part in zip(reversed(DEVICES), (0, 1), strict=True):
            half = words(region, on).view(2, -1)[part]
            torch.add(pattern(half.numel(), 100 + 2 * seed + part, on), 0, out=half)
            del half
            wait(on)
    seen = words(regions[0], 0)
    try:
        regions[0].close()
    except RegionInUse:
        told["closed_in_use"] = False
    else:
        told["closed_in_use"] = True
    del seen
    return told


def copy_gbs(source: Tensor, on: int) -> float:
    """GB/s of the best of COPIES copies into memory of GPU `on`, by a kernel that adds zero."""
    out = torch.empty_like(source)
    times: list[float] = []
    with torch.cuda.device(on):
        for _ in range(COPIES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.add(source, 0, out=out)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return round(float(source.nbytes) / min(times) / 1e6, 1)


def layout_for(sizes: Sequence[int], uuid: bytes, unit: int) -> Layout:
    """Regions side by side."""
    spans = tuple((sum(sizes[:index]), size) for index, size in enumerate(sizes))
    return Layout(Kind.CUDA_VMM, spans, sum(sizes), unit, 0, uuid)


def device(far: Far) -> dict[str, Any]:
    """Figures; raises RuntimeError where bits, descriptors or refusals aren't as they should be."""
    importer()
    figures, problems = shared(far)
    refused, wrong = refusals(far)
    figures |= {"device_refused": refused}
    problems += wrong
    if problems:
        raise RuntimeError(f"{problems}; figures: {figures}")
    return figures


def shared(far: Far) -> tuple[dict[str, Any], list[str]]:
    """Two batches that must arrive, the second with a warm driver; what the other one wrote is read here."""
    made = driver()
    unit = made.granularity(0)
    begun_ns = time.perf_counter_ns()
    regions = [DeviceRegion.create(made, size, 0) for size in SIZES]
    create_ms = (time.perf_counter_ns() - begun_ns) / 1e6
    layout = layout_for(SIZES, made.uuid(0), unit)
    first, second = (batch(far, layout, regions) for _ in range(2))
    figures = {
        "device_bytes": sum(SIZES),
        "device_granularity": unit,
        "device_create_ms": round(create_ms, 3),
        "device_batch_first_ms": round(first["offer_ms"], 3),
        "device_batch_ms": round(second["offer_ms"], 3),
        "device_accept_ms": round(second["accept_ms"], 3),
        "device_wrong_words_read": [first["wrong"], second["wrong"]],
        "device_wrong_words_written": [first["back"], second["back"]],
        "device_copy_gbs_by_gpu": second["copy_gbs"],
        "device_descriptors_while_mapped": second["while_mapped"],
        "device_descriptors_left": [second[name] - first[name] for name in ("own_opened", "opened")],
        **descriptor_facts(regions[0]),
    }
    free = torch.cuda.mem_get_info(0)[0]
    close(regions)
    figures["device_bytes_given_back"] = torch.cuda.mem_get_info(0)[0] - free
    problems = []
    if figures["device_bytes_given_back"] < sum(SIZES):
        problems.append("device memory wasn't given back")
    for told in (first, second):
        if any(told["wrong"].values()) or told["back"]:
            problems.append(f"wrong words: read {told['wrong']}, written {told['back']}")
        if told["closed_in_use"]:
            problems.append("a region was closed under a tensor")
    if any(figures["device_descriptors_left"]):
        problems.append("descriptors were left open")
    return figures, problems


def batch(far: Far, layout: Layout, regions: Sequence[DeviceRegion]) -> dict[str, Any]:
    """Fills the regions, hands them over, and counts the words that came back wrong."""
    for seed, region in enumerate(regions):
        words(region, 0).copy_(pattern(region.nbytes // 4, seed, 0))
    wait(0)
    with far.meeting("device", layout) as end:
        far.answer()  # its contexts are there
        begun_ns = time.perf_counter_ns()
        offer(end, layout, regions, WITHIN_S)
        offer_ms = (time.perf_counter_ns() - begun_ns) / 1e6
        told = far.answer()
    back = 0
    for seed, region in enumerate(regions):
        for part in range(2):
            half = words(region, 0).view(2, -1)[part]
            back += int((half != pattern(half.numel(), 100 + 2 * seed + part, 0)).sum())
            del half
    return {**told, "offer_ms": offer_ms, "back": back, "own_opened": len(os.listdir("/proc/self/fd"))}


def descriptor_facts(region: DeviceRegion) -> dict[str, Any]:
    """What this driver's descriptors look like."""
    one, other = region.export(), region.export()
    facts = {
        "descriptor_is": os.readlink(f"/proc/self/fd/{one}"),
        "descriptor_mode": f"{os.fstat(one).st_mode:#o}",
        "two_exports_share_an_inode": os.path.samestat(os.fstat(one), os.fstat(other)),
        "two_exports_are_one_file": DeviceImporter(driver(), ()).same(one, other),
    }
    os.close(one)
    os.close(other)
    return facts


class Disguised:
    """Offers a descriptor as device memory of a size and a device that it may not be."""

    kind = Kind.CUDA_VMM

    def __init__(self, export: Callable[[], int], nbytes: int, device_uuid: bytes) -> None:
        self.export, self.nbytes, self.device_uuid = export, nbytes, device_uuid

    def close(self) -> None:
        """There is nothing of its own."""


def refusals(far: Far) -> tuple[dict[str, str], list[str]]:
    """What the other process must refuse: (error by case, what was not as expected)."""
    made = driver()
    unit, uuid, other = made.granularity(0), made.uuid(0), made.uuid(1)
    small, large = DeviceRegion.create(made, unit, 0), DeviceRegion.create(made, 2 * unit, 0)
    plain, once = HostRegion.create(unit), small.export()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    cases: dict[str, tuple[str, tuple[int, ...], bytes, list[Callable[[], int]]]] = {
        "host memory": ("DescriptorKind", (unit,), uuid, [plain.export]),
        "another driver's file": ("CudaCallFailed", (unit,), uuid, [lambda: os.dup(null)]),
        "one descriptor twice": ("DescriptorDuplicate", (unit, unit), uuid, [lambda: os.dup(once)] * 2),
        "smaller than declared": ("CudaCallFailed", (2 * unit,), uuid, [small.export]),
        "larger than declared": ("DescriptorSize", (unit,), uuid, [large.export]),
        "on another GPU than declared": ("DescriptorDevice", (unit,), other, [small.export]),
        "on an unknown GPU": ("DescriptorDevice", (unit,), b"\1" * 16, [small.export]),
    }
    refused, wrong = {}, []
    for name, (due, sizes, where, exports) in cases.items():
        layout = layout_for(sizes, where, unit)
        pieces: list[Region] = [
            Disguised(export, size, where) for export, size in zip(exports, sizes, strict=True)
        ]
        heard = refusal(far, layout, pieces)
        told = far.answer()
        refused[name] = f"{told['error']}: {told['text']}"
        if (told["error"], heard, told["descriptors_left"]) != (due, due, 0):
            wrong.append(f"{name}: {due} was due; this side heard {heard}, the other one had {told}")
    os.close(null)
    os.close(once)
    close([plain, small, large])
    return refused, wrong


def refusal(far: Far, layout: Layout, pieces: Sequence[Region]) -> str | None:
    """The error that the offering side gets."""
    with far.meeting("refuse", layout) as end:
        try:
            offer(end, layout, pieces, WITHIN_S)
        except (DescriptorError, CudaCallFailed) as error:
            return type(error).__name__
    return None
