"""A rank whose peer is gone ends with one named error; sizes and settings that can't work are refused."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import Settings
from engine.errors import CollectiveFailed, ConfigError, ShapeMismatch
from engine.model.groups import ALONE, ONE, Group, Groups
from engine.model.ops import TorchOps
from engine.model.parallel import SpreadExperts
from engine.model.share import share_of
from engine.runner.collectives import open_groups
from tests.ranks.workers import RANKS, SILENT_S, Build, Workers

CPU = torch.device("cpu")


def test_a_killed_peer_ends_the_others_collective_at_once(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    value = np.zeros((2, 4), np.float32)
    workers.both("collective", "gather", value[0])
    workers.tell(0, "collective", "swap", value)
    workers.processes[1].kill()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="CollectiveFailed: 32 bytes among 2 ranks"):
        workers.hear(0)
    assert time.monotonic() - began < SILENT_S
    for process in workers.processes:
        process.join(SILENT_S)
    assert workers.processes[0].exitcode == 0


def test_a_rank_that_finds_no_peers_gives_up(tmp_path: Path) -> None:
    with pytest.raises(CollectiveFailed, match="rank 0 of 2 found no peers"):
        open_groups(0, RANKS, RANKS, CPU, f"file://{tmp_path}/nobody", 0.5)


def test_sizes_that_do_not_divide_are_refused() -> None:
    groups = Groups(Group(0, 3, None, None), Group(0, 3, None, None))
    config = Build(()).model(ALONE).config
    with pytest.raises(ConfigError, match="8 routed experts don't divide into 3 ranks"):
        share_of(config, groups, split_head=False)
    with pytest.raises(ConfigError, match="8192 tokens of the vocabulary don't divide"):
        share_of(config, Groups(groups.dp, ONE), split_head=True)
    with pytest.raises(ConfigError, match="2 ranks for experts"):
        open_groups(0, 4, 2, CPU, "file:///nowhere", 1.0)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match="--ep-size is 2"):
        Settings(ep_size=2)
    with pytest.raises(ConfigError, match="--ep-size is 2"):
        Settings(dp_size=4, ep_size=2)
    with pytest.raises(ConfigError, match="splits the head over ranks"):
        Settings(enable_dp_lm_head=True)
    assert Settings(dp_size=2, ep_size=2, enable_dp_lm_head=True).ep_size == 2


def test_more_rows_than_the_ranks_agreed_on_are_refused() -> None:
    x, ids = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
    moe = Build(()).model(ALONE).layers[0].weights.moe
    with pytest.raises(ShapeMismatch, match="3 rows, but the ranks agreed on 2"):
        SpreadExperts(ONE, 0).send(TorchOps(), x, ids, torch.zeros(3, 2), 2, moe)
