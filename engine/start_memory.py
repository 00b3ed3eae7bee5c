"""What takes a device's memory at start-up, part by part, and which setting would give the most back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from engine.errors import DeviceMemory
from engine.model.draft import Drafter
from engine.model.groups import Groups
from engine.model.model import DeepseekV4

MIB = 1 << 20

KINDS = {
    "routed": "routed experts", "shared_w13": "shared experts", "shared_w2": "shared experts",
    "attention": "attention", "compressor": "compressors", "indexer": "indexers", "moe": "routers",
    "attn_mhc": "hyper-connections", "ffn_mhc": "hyper-connections",
}  # fmt: skip
"""Kind of weights by the innermost field that names one."""


@dataclass(frozen=True, slots=True)
class Part:
    """bytes of one part; lever: the setting that makes it smaller, empty where there is none."""

    name: str
    bytes: int
    lever: str = ""


class MemoryTable:
    """Parts in the order in which they were taken.

    device  whose memory it is
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Part] = []

    def note(self, name: str, size: int, lever: str = "") -> None:
        """Adds a part where it takes anything."""
        if size > 0:
            self.parts.append(Part(name, size, lever))

    def note_rest(self, name: str, lever: str) -> None:
        """Adds what this process holds of a device beside the parts so far."""
        if self.device.type == "cuda":
            self.note(name, torch.cuda.memory_reserved(self.device) - self.bytes, lever)

    @property
    def bytes(self) -> int:
        """Of all parts."""
        return sum(part.bytes for part in self.parts)

    def lines(self) -> list[str]:
        """A line a part, then the sum, and on a device what is free."""
        rows = [f"memory: {part.bytes / MIB:10.1f} MiB {part.name}" for part in self.parts]
        total = f"memory: {self.bytes / MIB:10.1f} MiB in all"
        if self.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            total += f"; the device has {free >> 20} of {whole >> 20} MiB free"
        return [*rows, total]

    @contextmanager
    def taking(self, what: str, size: int = 0, lever: str = "") -> Iterator[None]:
        """Where the device has no room for `what`, the error tells what took it, and what to change.

        size, lever  of what is being taken, as far as it is known
        raises       DeviceMemory
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            wanted = [*self.parts, Part(what, size, lever)]
            levers = [part for part in wanted if part.lever]
            largest = max(levers, key=lambda part: part.bytes, default=None)
            way_out = "no setting makes any of it smaller: take more ranks or larger devices"
            if largest is not None:
                way_out = f"the largest that a setting changes is {largest.name}: {largest.lever}"
            raise DeviceMemory(
                f"no room for {what}; taken so far: "
                + (", ".join(f"{part.name} {part.bytes >> 20} MiB" for part in self.parts) or "nothing")
                + f"; {way_out}"
            ) from error


def free_device_bytes(device: torch.device) -> int:
    """Memory of the device that nobody has, what loading left behind being given back first."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def least_of_ranks(size: int, groups: Groups) -> int:
    """The least that any rank has, where they act together: their caches, and what they record, are alike."""
    together = groups.dp.cpu
    return size if together is None else int(together.gather(torch.tensor([size])).min())


def weights_by_kind(model: DeepseekV4, drafter: Drafter | None) -> dict[str, int]:
    """Bytes of the weights by kind, each tensor once; the draft's beside the target's."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    roots: list[tuple[str, object]] = [("embedding", model.embed), ("head", model.head)]
    roots += [("other", layer.weights) for layer in model.layers]
    if drafter is not None:
        roots.append(("draft", drafter.weights))
    for kind, root in roots:
        for own, tensor in _tensors(root, kind):
            place = tensor.untyped_storage().data_ptr()
            if place not in seen:
                seen.add(place)
                # Views share a storage: it counts once, as a whole.
                sizes[own] = sizes.get(own, 0) + tensor.untyped_storage().nbytes()
    return sizes


def _tensors(value: object, kind: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield kind, value
    elif is_dataclass(value):
        for field in fields(value):
            inner = kind if kind == "draft" else KINDS.get(field.name, kind)
            yield from _tensors(getattr(value, field.name), inner)
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item, kind)
