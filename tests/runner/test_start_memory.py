"""What a rank says of its memory, what it runs on, and how it refuses; without a device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.config import Settings
from engine.errors import ConfigError, DeviceMemory
from engine.kernel_sets import kernel_set, operations
from engine.model.groups import ONE, Group, Groups
from engine.start_memory import MIB, MemoryTable, least_of_ranks


def settings(**changes: object) -> Settings:
    return Settings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "name", "kind"),
    [
        ({}, "native", "CpuOps"),
        ({"dtype": "bfloat16"}, "torch", "TorchOps"),
        ({"device": "cuda"}, "torch", "TorchOps"),
        ({"device": "cuda", "dtype": "bfloat16"}, "triton", ""),
        ({"device": "cuda", "dtype": "bfloat16", "deterministic": True}, "triton", ""),
        ({"device": "cuda", "dtype": "float32", "deterministic": True}, "torch", "TileOps"),
        ({"device": "cuda", "dtype": "bfloat16", "kernels": "torch"}, "torch", "TorchOps"),
        ({"kernels": "torch", "deterministic": True}, "torch", "TileOps"),
    ],
)
def test_the_kernel_set_follows_device_and_type_unless_it_is_named(
    changes: dict[str, object], name: str, kind: str
) -> None:
    assert kernel_set(settings(**changes)) == name
    # Triton's have a flag on their device; they are made in tests/kernels/triton.
    if kind:
        assert type(operations(settings(**changes))).__name__ == kind


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels": "triton"}, "float32"),
        ({"kernels": "triton", "device": "cuda"}, "float32"),
        ({"kernels": "triton", "dtype": "bfloat16"}, "TRITON_INTERPRET"),
        ({"kernels": "native", "dtype": "bfloat16"}, "bfloat16 on cpu"),
    ],
)
def test_a_kernel_set_that_cant_run_is_refused_and_never_replaced(
    changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        operations(settings(**changes))


class Peers:
    """Two more ranks, with 70 and 90 bytes."""

    def gather(self, own: Tensor) -> Tensor:
        return torch.stack([own, own.new_tensor([70]), own.new_tensor([90])])

    def swap(self, parts: Tensor) -> Tensor:
        raise AssertionError("nobody has anything for one rank alone")


def test_ranks_that_act_together_have_the_memory_of_the_one_with_the_least() -> None:
    groups = Groups(Group(0, 3, Peers(), None), ONE)
    assert [least_of_ranks(own, groups) for own in (80, 60)] == [70, 60]
    assert least_of_ranks(80, Groups(Group(0, 3, None, None), ONE)) == 80


def test_a_full_device_names_what_took_it_and_the_largest_lever() -> None:
    table = MemoryTable(torch.device("cpu"))
    table.note("weights: routed experts", 900 * MIB)
    table.note("cache", 500 * MIB, "lower --max-total-tokens")
    table.note("nothing", 0, "of no use")
    with pytest.raises(DeviceMemory) as caught, table.taking("graphs", 20 * MIB, "fewer buckets"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    text = str(caught.value)
    assert "no room for graphs" in text
    assert "routed experts 900 MiB, cache 500 MiB" in text
    assert "cache: lower --max-total-tokens" in text
    assert table.lines()[-1].split() == ["memory:", "1400.0", "MiB", "in", "all"]
    bare = MemoryTable(torch.device("cpu"))
    with pytest.raises(DeviceMemory, match="larger devices"), bare.taking("the weights"):
        raise torch.OutOfMemoryError
