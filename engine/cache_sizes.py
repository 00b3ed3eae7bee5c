"""How many slots and pages a rank has: from the settings, or from the memory that is free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.config import Settings
from engine.errors import ConfigError
from engine.memory.pages import ASIDE, pages_for
from engine.model.config import KVFormat, ModelConfig, pools

_LEVERS = (
    "lower --max-running-requests, --max-total-tokens or --chunked-prefill-size, "
    "or raise --mem-fraction-static"
)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Slots and pages, with their sinks and what is set aside (ASIDE); `bytes` of all pools together."""

    slots: int
    full_pages: int
    window_pages: int
    context_length: int
    bytes: int


def cache_sizes(
    config: ModelConfig,
    settings: Settings,
    value_bytes: int,
    free_bytes: int,
    draft_bytes: int = 0,
    kv: KVFormat = "model",
) -> CacheSizes:
    """Sizes that fit into the settings' share of `free_bytes`, weights being loaded already.

    Without --max-total-tokens the cache grows to what the running requests can use at most, or to the share.
    The window pages follow --swa-full-tokens-ratio, but are at least what every running request needs to
    decode and one of them to prefill, and at most what they can hold.

    value_bytes  of a value of the model's type
    draft_bytes  that drafting keeps for a slot
    kv           what pools hold
    raises       ConfigError with the figures where even the least doesn't fit
    """
    context = settings.context_length or config.max_position_embeddings
    running = settings.max_running_requests
    unit = {space: bytes_of(config, space, value_bytes, kv) for space in ("slot", "full", "window")}
    unit["slot"] += draft_bytes
    chunk_pages = pages_for(config.sliding_window + settings.chunked_prefill_size) + 1
    decode_pages = pages_for(config.sliding_window) + 1
    window_least = running * decode_pages + chunk_pages
    window_most = running * max(decode_pages, min(chunk_pages, pages_for(context)))
    slots = 1 + running + ASIDE
    budget = int(free_bytes * settings.cache_share) - slots * unit["slot"]

    def window_for(full: int) -> int:
        return max(min(math.ceil(full * settings.swa_full_tokens_ratio), window_most), window_least)

    def bytes_for(full: int) -> int:
        return (1 + full + ASIDE) * unit["full"] + (1 + window_for(full) + ASIDE) * unit["window"]

    full = pages_for(settings.max_total_tokens) or running * pages_for(context)
    while not settings.max_total_tokens and full > 1 and bytes_for(full) > budget:
        full = max(1, full * 7 // 8)
    if bytes_for(full) > budget:
        pages = f"{full} full and {window_for(full)} window pages need {bytes_for(full) >> 20} MiB"
        share = f"{max(budget, 0) >> 20} MiB are its share of {free_bytes >> 20} MiB"
        raise ConfigError(f"{pages}, but {share}; {_LEVERS}")
    total = bytes_for(full) + slots * unit["slot"]
    return CacheSizes(slots, 1 + full + ASIDE, 1 + window_for(full) + ASIDE, context, total)


def bytes_of(config: ModelConfig, space: str, value_bytes: int, kv: KVFormat = "model") -> int:
    """Bytes of one slot, full page or window page over all layers."""
    return sum(spec.unit_bytes(value_bytes) for spec in pools(config, kv) if spec.space == space)


def free_host_bytes() -> int:
    """Memory that the host can give without swapping, within this process's control group."""
    free = _meminfo()
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        # No control group, or "max": the host's figure stands.
        return free
    return min(free, max(limit - used, 0))


def _meminfo() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise ConfigError("/proc/meminfo doesn't say MemAvailable; give --max-total-tokens")
