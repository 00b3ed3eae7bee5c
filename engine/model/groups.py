"""Which ranks act together, and how: what model code gets instead of a default group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """What a group's ranks do together. Every rank makes the same calls, in the same order, of equal shapes.

    raises  CollectiveFailed where a peer is gone or silent for too long
    """

    def gather(self, own: Tensor) -> Tensor:
        """own [...], contiguous, of every rank: [ranks, ...], in rank order."""

    def swap(self, parts: Tensor) -> Tensor:
        """parts [ranks, ...], contiguous, part r for rank r: [ranks, ...], part r from rank r."""


@dataclass(frozen=True, slots=True)
class Near:
    """Memory of every rank's device that the kernels of every rank's device read and write. It goes with the
    processes.

    regions     uint8, by rank, of equal sizes, as this rank addresses them; zeros when they were made
    patience_s  how long a kernel waits for another rank's
    """

    regions: tuple[Tensor, ...]
    patience_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that act together in one way; `rank` is this one's place among `size`.

    cpu, device  their collectives for tensors on the host and on the model's device; None in a group of one
    near         memory that they share; None where their devices don't reach each other
    """

    rank: int
    size: int
    cpu: Collectives | None
    device: Collectives | None
    near: Near | None = None

    @property
    def there(self) -> Collectives:
        """The device's collectives of a group of more than one."""
        assert self.device is not None
        return self.device


ONE = Group(0, 1, None, None)


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups of one rank.

    dp  each has requests and caches of its own
    ep  each holds a share of the routed experts
    """

    dp: Group
    ep: Group


ALONE = Groups(ONE, ONE)
"""The groups of a single rank."""
