"""Caches in FP8: what they take, who may have them, and that they give what simulated rounding gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cache_format import cache_format
from engine.cache_sizes import bytes_of, cache_sizes
from engine.config import Settings
from engine.errors import ConfigError, ShapeMismatch
from engine.kernels.cpu import CpuOps
from engine.memory.pools import KVState
from engine.model.config import KVFormat, ModelConfig
from engine.model.dummy import DummyWeights
from engine.model.keys import Keys
from engine.model.latent_rows import pack_rows, read_keys, read_latents, unpack_rows
from engine.model.layout import FLOAT_LAYOUT
from engine.model.model import DeepseekV4
from engine.model.ops import TorchOps
from engine.model.rounding import KVRounding, Rounding
from engine.model.row_layout import V4_ROW, RowLayout, layout_of
from tests.golden.driver import Driver
from tests.golden.tiny import random_tokens, tiny_config
from tests.model.test_config import FLASH

CPU = torch.device("cpu")
# Wide enough that 64 channels carry no rotation; few entries are selected, so that selection begins early.
WIDE = {"head_dim": 80, "index_topk": 8, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return tiny_config(**WIDE)


def driver(config: ModelConfig, kv: KVFormat, rounding: KVRounding, dtype: torch.dtype) -> Driver:
    weights = DummyWeights(config, dtype, CPU, seed=5, layout=FLOAT_LAYOUT)
    model = DeepseekV4(
        config, weights, device=CPU, dtype=dtype, deterministic=False, kv_rounding=rounding, ops=TorchOps()
    )
    return Driver(model, kv=kv)


def history(driver: Driver) -> list[Tensor]:
    """Logits of prefills in odd chunks, verified rows of which some are rejected, and a resumed prefix."""
    ids = {slot: random_tokens(300, slot) for slot in (1, 2)}
    out, at = [], {1: 0, 2: 0}
    for slot in ids:
        driver.bind(slot)

    def run(counts: dict[int, int], lens: dict[int, int] | None = None) -> None:
        groups = [(slot, ids[slot][at[slot] : at[slot] + count]) for slot, count in counts.items()]
        out.extend(driver.run(groups, None if lens is None else [lens[slot] for slot in counts]))
        for slot, count in (lens or counts).items():
            at[slot] += count

    for counts in ({1: 61}, {1: 1, 2: 90}, {1: 60, 2: 1}, {2: 29}):
        run(counts)
    run({1: 6, 2: 6}, {1: 4, 2: 6})
    run({1: 6, 2: 6}, {1: 0, 2: 1})
    run({1: 256 - at[1], 2: 1})
    state = driver.state
    _, halves = state.snapshot_rows(1)
    driver.bind(3)
    state.map_pages(np.array([[3, 0, state.full_table[1, 0], state.window_table[1, 0]]], np.int32))
    ring = state.pool("c4_ring").view(len(halves), state.slots, 8, -1)
    ring[:, 3, 4:, : halves.shape[-1]] = halves
    driver.lengths[3], driver.mapped[3] = 256, 1
    resumed = driver.run([(3, ids[1][256:263])])[0]
    run({1: 7}, {1: 3})
    assert torch.equal(resumed, out[-1])
    run({1: 4, 2: 5})
    return [*out, resumed]


@pytest.fixture(scope="module")
def coded(config: ModelConfig) -> tuple[Driver, list[Tensor]]:
    """A float32 model on FP8 caches, and the logits of its history."""
    own = driver(config, "fp8", "none", torch.float32)
    return own, history(own)


def test_fp8_caches_give_what_simulated_rounding_gives_bit_by_bit(
    config: ModelConfig, coded: tuple[Driver, list[Tensor]]
) -> None:
    """In float32, which holds what codes and scales stand for: windows, entries, index keys, selection."""
    simulated = driver(config, "model", "fp8", torch.float32)
    for own, wanted in zip(coded[1], history(simulated), strict=True):
        assert torch.equal(own, wanted)
    plain = driver(config, "model", "none", torch.float32)
    assert not torch.equal(plain.full(random_tokens(300, 1)[:61], [61]), coded[1][0])


def test_latents_of_a_bfloat16_model_are_those_of_the_mode_of_the_released_weights(
    config: ModelConfig,
) -> None:
    """Before any selection, which index keys of another format decide."""
    few = random_tokens(4 * config.index_topk + 3, 9)
    coded, simulated = (
        driver(config, "fp8", "none", torch.bfloat16),
        driver(config, "model", "simulated", torch.bfloat16),
    )
    assert torch.equal(coded.full(few, [17, 1, 9]), simulated.full(few, [17, 1, 9]))
    layout = RowLayout(config.nope_dim, config.qk_rope_head_dim)
    for name in ("window", "c4"):
        rows, wanted = coded.state.pool(name), simulated.state.pool(name)
        assert torch.equal(unpack_rows(rows.flatten(0, 1), layout).view(wanted.shape), wanted)
        assert wanted.any()


def test_rows_that_are_absent_stay_zero(config: ModelConfig, coded: tuple[Driver, list[Tensor]]) -> None:
    own = coded[0]
    for name, spec in own.state.specs.items():
        pool = own.state.pool(name)
        if spec.space != "slot":
            assert not pool.view(torch.uint8)[:, 0].any()
            assert pool.view(torch.uint8)[:, spec.page_rows :].any()
    cache, none = own.state.layer(1), torch.zeros(1, dtype=torch.int64)
    assert cache.c4 is not None
    assert cache.index is not None
    assert not read_latents(cache.c4, none, torch.empty(config.head_dim)).any()
    assert not read_keys(cache.index, cache.index_scales, none).any()


def test_the_released_geometry_takes_the_bytes_of_its_reference() -> None:
    """3,850.25 bytes of compressed rows a token in FP8, 584 of the window's a layer; 6,880 in bfloat16."""
    flash = ModelConfig.from_dict(FLASH)
    assert bytes_of(flash, "full", 2, "fp8") / 256 == 3850.25
    assert bytes_of(flash, "full", 2) / 256 == 6880
    assert bytes_of(flash, "window", 2, "fp8") / 256 == 43 * 584
    assert bytes_of(flash, "slot", 2, "fp8") == bytes_of(flash, "slot", 2)


@pytest.mark.parametrize("kv", ["model", "fp8"])
def test_a_cache_takes_what_its_sizes_say(config: ModelConfig, kv: KVFormat) -> None:
    settings = Settings(max_running_requests=2, max_total_tokens=2048, chunked_prefill_size=256)
    sizes = cache_sizes(config, settings, 2, 1 << 40, draft_bytes=100, kv=kv)
    state = KVState(config, sizes.slots, sizes.full_pages, sizes.window_pages, CPU, torch.bfloat16, kv)
    assert sum(state.bytes_by_pool().values()) + 100 * sizes.slots == sizes.bytes


def test_the_same_memory_holds_more_pages_in_fp8(config: ModelConfig) -> None:
    settings = Settings(max_running_requests=8)
    pages = {kv: cache_sizes(config, settings, 2, 16 << 20, kv=kv).full_pages for kv in ("model", "fp8")}
    assert pages["fp8"] > pages["model"]


@pytest.mark.parametrize(
    ("changes", "kv"),
    [
        ({}, "model"),
        ({"kernels": "torch", "kv_cache_dtype": "fp8"}, "fp8"),
        ({"kernels": "torch", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, "fp8"),
        ({"kernels": "triton", "dtype": "bfloat16"}, "model"),
        ({"device": "cuda", "dtype": "bfloat16"}, "fp8"),
        ({"device": "cuda", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, "model"),
        ({"device": "cuda", "dtype": "bfloat16", "deterministic": True}, "fp8"),
        ({"device": "cuda"}, "model"),
    ],
)
def test_the_format_follows_the_kernels_unless_it_is_named(
    config: ModelConfig, changes: dict[str, object], kv: str
) -> None:
    assert cache_format(Settings(**changes), config) == kv  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kernels native"),
        ({"kernels": "torch", "deterministic": True, "kv_cache_dtype": "fp8"}, "--deterministic"),
        ({"kv_cache_dtype": "bfloat16"}, "not float32"),
    ],
)
def test_a_format_that_kernels_dont_read_is_refused(
    config: ModelConfig, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        cache_format(Settings(**changes), config)  # type: ignore[arg-type]
    narrow = tiny_config()
    with pytest.raises(ConfigError, match="48 channels"):
        cache_format(Settings(kernels="torch", kv_cache_dtype="fp8"), narrow)
    with pytest.raises(ShapeMismatch):
        KVState(narrow, 2, 2, 2, CPU, torch.float32, "fp8")


def test_c_kernels_refuse_rows_that_they_would_misread() -> None:
    keys = Keys(
        torch.zeros(4, V4_ROW.row_bytes, dtype=torch.uint8), torch.ones(1, 2).long(), torch.zeros(1, 1, 2)
    )
    with pytest.raises(ShapeMismatch, match="uint8"):
        CpuOps().attend(torch.zeros(1, 1, 2, 512), keys, None, torch.zeros(2))


def test_a_layout_is_found_by_its_sizes_and_large_values_saturate(config: ModelConfig) -> None:
    for layout in (V4_ROW, RowLayout(64, 16), RowLayout(576, 64)):
        assert layout_of(layout.nope + layout.rotary, layout.row_bytes) == layout
    with pytest.raises(ShapeMismatch):
        layout_of(512, 600)
    drawn = torch.randn(5, 80, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1e-9], [1], [9], [1e3], [1e6]]
    )
    layout = RowLayout(64, 16)
    read = unpack_rows(pack_rows(drawn, layout), layout)
    assert torch.equal(read.float()[:4], Rounding(config, "fp8", torch.float32).latent(drawn)[:4])
    assert float(read[4, :64].abs().max()) == 448 * 2.0**7
