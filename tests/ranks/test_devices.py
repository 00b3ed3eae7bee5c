"""Which devices a rank's process sees."""

from __future__ import annotations

import pytest

from engine.config import Settings
from engine.errors import ConfigError
from engine.lifecycle_launcher import device_of


def seen(rank: int, ranks: int = 3) -> str:
    return device_of(Settings(device="cuda", dtype="bfloat16", dp_size=ranks), rank)["CUDA_VISIBLE_DEVICES"]


def test_a_rank_s_own_device_comes_first_and_the_other_ranks_devices_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [seen(rank) for rank in range(3)] == ["0,1,2", "1,0,2", "2,0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5,3,1")
    assert [seen(rank) for rank in range(3)] == ["7,GPU-5,3", "GPU-5,7,3", "3,7,GPU-5"]
    assert device_of(Settings(device="cuda", dtype="bfloat16"), 0) == {}
    assert device_of(Settings(dp_size=2), 1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="names 2 devices"):
        seen(0)
