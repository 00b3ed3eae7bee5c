"""Memory that processes of one host share, handed over as POSIX descriptors (SCM_RIGHTS) and in no other way.

Host memory is a sealed memfd, device memory an allocation of CUDA's virtual memory management. `descriptors`
has the protocol; `memory` and `device` the two kinds; `tensors` the views.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

from engine.errors import DescriptorCount, DescriptorSpan

LARGEST_POOL = 2**62
LARGEST_BATCH = 256
NO_DEVICE = bytes(16)


class Kind(IntEnum):
    """What a descriptor stands for."""

    MEMFD = 1
    CUDA_VMM = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """The geometry of one batch, known to both ends before anything is sent.

    spans         (offset, size) in bytes of each region in its pool, by index; multiples of `granularity`
    pool_bytes    of the whole pool; spans lie inside it and never over each other, gaps are allowed
    granularity   bytes; a power of two
    generation    of the pool: a later batch of the same session has a higher one
    device        UUID of the device that holds the memory; zeros for host memory
    raises DescriptorSpan, DescriptorCount
    """

    kind: Kind
    spans: tuple[tuple[int, int], ...]
    pool_bytes: int
    granularity: int
    generation: int = 0
    device: bytes = NO_DEVICE

    def __post_init__(self) -> None:
        if not 0 < len(self.spans) <= LARGEST_BATCH:
            raise DescriptorCount(f"a batch has 1 to {LARGEST_BATCH} regions, not {len(self.spans)}")
        if self.granularity <= 0 or self.granularity & (self.granularity - 1):
            raise DescriptorSpan(f"a granularity of {self.granularity} bytes is no power of two")
        if not 0 < self.pool_bytes <= LARGEST_POOL:
            raise DescriptorSpan(f"a pool has 1 to {LARGEST_POOL} bytes, not {self.pool_bytes}")
        for index, span in enumerate(self.spans):
            check_span(span, self.pool_bytes, self.granularity, index)
        check_apart(self.spans)


def check_span(span: tuple[int, int], pool_bytes: int, granularity: int, index: int) -> None:
    """raises DescriptorSpan."""
    offset, size = span
    where = f"span {index}, {size} bytes at {offset}"
    if size <= 0 or size % granularity or offset < 0 or offset % granularity:
        raise DescriptorSpan(f"{where}: not in multiples of {granularity} bytes")
    if offset + size > pool_bytes:
        raise DescriptorSpan(f"{where}: ends beyond its pool of {pool_bytes} bytes")


def check_apart(spans: tuple[tuple[int, int], ...]) -> None:
    """raises DescriptorSpan where two spans share a byte."""
    ordered = sorted(spans)
    for (offset, size), (following, _) in itertools.pairwise(ordered):
        if offset + size > following:
            raise DescriptorSpan(f"spans overlap: {size} bytes at {offset} reach beyond {following}")


class Region(Protocol):
    """One piece of memory, mapped into this process."""

    @property
    def kind(self) -> Kind: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def device_uuid(self) -> bytes: ...
    def export(self) -> int:
        """A new descriptor of it, which the caller closes."""

    def close(self) -> None:
        """Unmaps and releases it; a second time does nothing. raises RegionInUse while views of it live."""


R_co = TypeVar("R_co", bound=Region, covariant=True)


class Importer(Protocol[R_co]):
    """How the receiver checks and maps one kind of memory."""

    @property
    def kind(self) -> Kind: ...
    def check(self, descriptor: int, nbytes: int) -> None:
        """raises DescriptorKind, DescriptorSize, DescriptorUnsealed."""

    def same(self, one: int, other: int) -> bool:
        """Whether two descriptors stand for the same memory."""

    def adopt(self, descriptor: int, nbytes: int, device_uuid: bytes) -> R_co:
        """Maps it; the descriptor stays the caller's."""
