"""Opens the memory that kernels of all ranks reach: a region of each device, handed to every other rank."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from engine.config import Settings
from engine.errors import CollectiveFailed, ConfigError, DescriptorError
from engine.kernels.near_planes import bytes_for
from engine.model.config import ModelConfig
from engine.model.groups import Groups, Near
from engine.transport import Kind, Layout
from engine.transport.connections import Connection, Identity, Rendezvous, connect, identity_of
from engine.transport.cuda import Driver
from engine.transport.descriptors import accept, offer
from engine.transport.device import DeviceImporter, DeviceRegion
from engine.transport.tensors import device_tensor

WITHIN_S = 60.0


def bytes_of_steps(settings: Settings) -> int:
    """Of a region with room for the largest steps: a chunk of prompts beside requests that decode or verify.

    raises ConfigError
    """
    config, rows = ModelConfig.from_json(settings.model_path), settings.chunked_prefill_size
    block = config.dspark.block_size if settings.speculative_algorithm and config.dspark else 0
    rows += settings.max_running_requests * (1 + (settings.speculative_num_draft_tokens or block))
    return bytes_for(settings.dp_size, rows, config.hidden_size, config.num_experts_per_tok)


class _Rank(NamedTuple):
    """What a rank tells the others: where it waits, who it is, its device and region; or why it can't."""

    path: str
    identity: Identity
    uuid: bytes
    size: int
    token: bytes
    fault: str


def open_near(
    groups: Groups, device: torch.device, size: int, patience_s: float, say: Callable[[str], None]
) -> Groups:
    """These groups, whose experts' group shares memory where all of its devices reach each other.

    Called by every rank after `open_groups`. Where one can't, none does, and each says why: experts' rows go
    by the group's collectives then. The memory goes with the process.

    size        of each rank's region at least, in bytes; equal on all ranks
    patience_s  how long a kernel waits for another rank's
    raises      CollectiveFailed where a rank is lost meanwhile
    """
    if groups.ep.size == 1 or device.type != "cuda":
        return groups
    rendezvous = Rendezvous()
    try:
        opening = _Opening(groups.ep.rank, device.index or 0, size, rendezvous)
        if fault := opening.prepare():
            say(f"devices share no memory, experts' rows go by collectives: {fault}")
            return groups
        regions = opening.exchange()
        tensors = tuple(device_tensor(one, opening.number, torch.uint8, (one.nbytes,)) for one in regions)
    except (DescriptorError, RuntimeError) as error:
        raise CollectiveFailed(f"memory of {groups.ep.size} ranks couldn't be shared: {error}") from error
    finally:
        rendezvous.close()
    say(f"experts' rows go by memory of the devices: {tensors[0].numel() >> 20} MiB of each")
    return replace(groups, ep=replace(groups.ep, near=Near(tensors, patience_s)))


class _Opening:
    """One rank's part of it."""

    def __init__(self, rank: int, number: int, size: int, rendezvous: Rendezvous) -> None:
        self.rank, self.number, self._size, self.rendezvous = rank, number, size, rendezvous
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=WITHIN_S))
        self._own: DeviceRegion | None = None
        self._driver: Driver | None = None
        self._ranks: list[_Rank] = []

    def prepare(self) -> str:
        """Makes this rank's region, cleared; returns why some rank can't go on, or nothing."""
        uuid, fault = b"", ""
        try:
            self._driver = Driver()
            uuid, unit = self._driver.uuid(self.number), self._driver.granularity(self.number)
            self._size = -(-self._size // unit) * unit
            self._own = DeviceRegion.create(self._driver, self._size, self.number)
            device_tensor(self._own, self.number, torch.uint8, (self._size,)).zero_()
            # No stream of this process orders what other processes write there.
            torch.cuda.current_stream(self.number).synchronize()
        except (DescriptorError, ConfigError) as error:
            fault = str(error)
        place, own = self.rendezvous.path, identity_of(os.getpid())
        told = _Rank(place, own, uuid, self._size, secrets.token_bytes(16), fault)
        self._ranks = _gathered(told, self.group)
        if all(not rank.fault for rank in self._ranks):
            fault = self._reach()
        fault = _first(_gathered(fault, self.group))
        if fault and self._own is not None:
            self._own.close()
        return fault

    def _reach(self) -> str:
        """Why this rank's device doesn't reach every other rank's, if it doesn't."""
        assert self._driver is not None
        if len({rank.size for rank in self._ranks}) > 1:
            return f"regions are of {sorted({rank.size for rank in self._ranks})} bytes"
        try:
            for rank in self._ranks:
                self._driver.check_reaches(self.number, self._driver.device_of(rank.uuid))
        except DescriptorError as error:
            return str(error)
        return ""

    def exchange(self) -> tuple[DeviceRegion, ...]:
        """All ranks' regions, by rank. raises DescriptorError"""
        assert self._own is not None
        regions = {self.rank: self._own}
        for pair in combinations(range(len(self._ranks)), 2):
            if self.rank in pair:
                other = sum(pair) - self.rank
                with self._connected(pair, other) as connection:
                    regions[other] = self._swapped(connection, other)
            # A rendezvous takes whoever comes first: one pair at a time. Behind the last one all regions are
            # there, and cleared.
            dist.barrier(group=self.group)
        return tuple(regions[rank] for rank in sorted(regions))

    def _connected(self, pair: tuple[int, int], other: int) -> Connection:
        host, peer = self._ranks[pair[0]], self._ranks[other].identity
        way = host.token, self.rank, other, peer, WITHIN_S
        return self.rendezvous.accept(*way) if self.rank == pair[0] else connect(host.path, *way)

    def _swapped(self, connection: Connection, other: int) -> DeviceRegion:
        assert self._own is not None
        assert self._driver is not None
        importer, found = DeviceImporter(self._driver, (self.number,)), None
        for giving in sorted((self.rank, other)):
            layout = self._layout(self._ranks[giving].uuid)
            if giving == self.rank:
                offer(connection, layout, [self._own], WITHIN_S)
            else:
                found = accept(connection, layout, importer, WITHIN_S)[0]
        assert found is not None
        return found

    def _layout(self, uuid: bytes) -> Layout:
        assert self._driver is not None
        unit = self._driver.granularity(self.number)
        return Layout(Kind.CUDA_VMM, ((0, self._size),), self._size, unit, 0, uuid)


def _gathered(told: Any, group: Any) -> list[Any]:
    """What every rank told, by rank."""
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, told, group=group)
    return out


def _first(faults: list[str]) -> str:
    """Of the first rank that has one."""
    return next((f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault), "")
