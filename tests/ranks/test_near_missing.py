"""Ranks whose devices share no memory go on without, and say why."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from engine.runner.collectives import close_groups, open_groups
from engine.runner.near import open_near

RANKS, SILENT_S = 2, 60.0


def live(rank: int, meet_at: str, pipe: Connection) -> None:
    """A rank's process: what it said, and whether it has memory of others."""
    torch.set_num_threads(1)
    groups, said = open_groups(rank, RANKS, RANKS, torch.device("cpu"), meet_at, SILENT_S), list[str]()
    opened = open_near(groups, torch.device("cuda", 0), 1 << 20, SILENT_S, said.append)
    pipe.send((said, opened.ep.near is None and opened.ep.device is groups.ep.device))
    close_groups(groups)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there")
def test_without_a_driver_every_rank_says_why_and_keeps_its_collectives(tmp_path: Path) -> None:
    context, ranks = multiprocessing.get_context("spawn"), []
    for rank in range(RANKS):
        near, far = context.Pipe()
        process = context.Process(target=live, args=(rank, f"file://{tmp_path}/meet", far), daemon=True)
        process.start()
        ranks.append((near, process))
    for near, process in ranks:
        assert near.poll(SILENT_S)
        (line,), kept = near.recv()
        assert line.startswith("devices share no memory, experts' rows go by collectives: rank 0: ")
        assert "without the CUDA driver" in line
        assert kept
        process.join(SILENT_S)
        assert process.exitcode == 0
