"""The KV state of one rank: paged pools shared by all requests, and the fixed state of each request slot.

A logical page is 256 tokens. A *full page* id addresses 64 c4, 64 index and 2 c128 rows of every layer that
has them; a *window page* id addresses 256 raw latents of every layer. The two id spaces are apart, because
window pages are freed as soon as they are out of every later query's reach. Page 0 and slot 0 are sinks:
padding writes there (row 1 and up); row 0 of page 0 is never written, so that an absent key reads as zero.
Rows are values of the model's type, or codes with their scales: whoever copies, shares or sends rows needn't
know.

Committed state of a slot is: its length, every pool row below that length, its c4 ring (raw rows of the last
eight positions) and its online c128 state. A forward writes pool rows at and past the committed length only;
they are invisible to all until `commit` moves the length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import ConfigError, PageAccounting
from engine.model.config import C4, PAGE_TOKENS, KVFormat, ModelConfig, PoolSpec, pools
from engine.model.step import LayerCache

Int32 = npt.NDArray[np.int32]


class KVState:
    """Pools, page tables and slot state.

    slots          request slots, sink included
    full_pages     full pages, sink included
    window_pages   window pages, sink included
    kv             what pools hold: values of `dtype`, or FP8 rows and keys
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        full_pages: int,
        window_pages: int,
        device: str | torch.device,
        dtype: torch.dtype,
        kv: KVFormat = "model",
    ) -> None:
        if min(slots, full_pages, window_pages) < 2:
            raise ConfigError(
                f"{slots} slots, {full_pages} full and {window_pages} window pages: 2 of each is least"
            )
        self.config = config
        self.device, self.dtype, self.kv = torch.device(device), dtype, kv
        self.slots, self.full_pages, self.window_pages = slots, full_pages, window_pages
        units = {"full": full_pages, "window": window_pages, "slot": slots}
        self.specs = {spec.name: spec for spec in pools(config, kv)}
        self._pools = {name: self._allocate(spec, units[spec.space]) for name, spec in self.specs.items()}
        self.relay = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=self.device)
        longest = -(-config.max_position_embeddings // PAGE_TOKENS)
        self.full_table: Int32 = np.zeros((slots, min(longest, full_pages)), dtype=np.int32)
        self.window_table: Int32 = np.zeros_like(self.full_table)
        self.generations: Int32 = np.zeros(slots, dtype=np.int32)
        self._layers = [self._layer_cache(layer) for layer in range(config.num_hidden_layers)]

    def _allocate(self, spec: PoolSpec, units: int) -> Tensor:
        """[layers, units * rows, width], zeroed: stale values must at least be numbers."""
        shape = (len(spec.layers), units * spec.page_rows, spec.row_width)
        dtype = getattr(torch, spec.dtype) if spec.dtype else self.dtype
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def pool(self, name: str) -> Tensor:
        """Pool `name` of `pools(config)`: [layers, pages or slots * rows, width]."""
        return self._pools[name]

    def layer(self, layer: int) -> LayerCache:
        """Flat views of one layer's caches."""
        return self._layers[layer]

    def _layer_cache(self, layer: int) -> LayerCache:
        def view(name: str) -> Tensor | None:
            owners = self.specs[name].layers if name in self.specs else ()
            return self._pools[name][owners.index(layer)] if layer in owners else None

        window, state, scales = view("window"), view("c128_state"), view("index_scales")
        assert window is not None
        state = None if state is None else state.view(self.slots, 3, -1)
        scales = None if scales is None else scales.flatten()
        return LayerCache(window, view("c4"), view("index"), view("c128"), view("c4_ring"), state, scales)

    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes that each pool takes."""
        return {name: pool.numel() * pool.element_size() for name, pool in self._pools.items()}

    def bind(self, slot: int, generation: int) -> None:
        """Gives `slot` to a new request: length 0, no pages. Plans never read a former request's state."""
        if not 0 < slot < self.slots:
            raise PageAccounting(f"slot {slot} can't be bound; slots are 1 to {self.slots - 1}")
        self.generations[slot] = generation
        self.full_table[slot] = 0
        self.window_table[slot] = 0
        self.lengths[slot] = 0

    def map_pages(self, entries: Int32) -> None:
        """Adds page-table entries [P, 4]: (slot, logical page, full page, window page)."""
        if not entries.size:
            return
        slot, logical, full, window = entries.T
        if logical.max() >= self.full_table.shape[1]:
            raise PageAccounting(
                f"logical page {logical.max()} is past the table's {self.full_table.shape[1]}"
            )
        if full.max() >= self.full_pages or window.max() >= self.window_pages:
            held = f"{self.full_pages} full, {self.window_pages} window pages"
            raise PageAccounting(f"pages {full.max()}/{window.max()} exceed {held}")
        self.full_table[slot, logical] = full
        self.window_table[slot, logical] = window

    def snapshot_rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """What a committed page boundary must keep beside its pages to be resumable.

        returns  (the last 128 flat window rows [128] int64, a copy of the A-halves of the last c4 window
                 [c4 layers, 4, C / 2]); the c128 state is empty there
        raises   PageAccounting where the slot isn't at a boundary
        """
        length = int(self.lengths[slot])
        if length == 0 or length % PAGE_TOKENS:
            raise PageAccounting(f"slot {slot} is at {length} tokens, not at a multiple of {PAGE_TOKENS}")
        page = int(self.window_table[slot, length // PAGE_TOKENS - 1])
        rows = torch.arange(PAGE_TOKENS - 128, PAGE_TOKENS, device=self.device) + page * PAGE_TOKENS
        ring = self._pools["c4_ring"].view(-1, self.slots, 2 * C4, self.specs["c4_ring"].row_width)
        return rows, ring[:, slot, C4:, : ring.shape[-1] // 2].clone()
