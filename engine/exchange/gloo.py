"""The process group under the collective exchange."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from engine.errors import PeerDead
from engine.exchange.collective import Group

REST = timedelta(days=365)
"""A receive is open for as long as a peer is at rest; deadlines are the exchange's own."""


def open_group(rank: int, ranks: int, meet_at: str) -> Group:
    """A group of its own for the exchange, apart from those of the model; returns when all have joined.

    meet_at  path of a file that doesn't exist yet, the same for all ranks, new for each start
    raises   ExchangeError
    """
    try:
        return dist.ProcessGroupGloo(FileStore(meet_at, ranks), rank, ranks, REST)
    except RuntimeError as error:
        raise PeerDead(f"rank {rank} of {ranks} found no peers at {meet_at}: {error}", rank) from error
