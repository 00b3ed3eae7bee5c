"""What the attention kernels compute, in plain torch. Slow, and on any device."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.model.keys import AnyKeys, Keys, SeenKeys, dense
from engine.model.ops import TorchOps


def attend(
    q: Tensor, window: AnyKeys, compressed: AnyKeys | None, sink: Tensor, back: Tensor | None
) -> Tensor:
    """As the kernel, in float32 throughout, by `TorchOps`; [blocks, W, heads, D] float32."""
    blocks, width = q.shape[:2]
    parts = [_told(keys, blocks, width) for keys in (window, compressed) if keys is not None]
    ops = TorchOps()
    out = ops.attend(q.float(), parts[0], parts[1] if len(parts) > 1 else None, sink)
    if back is not None:
        ops.rotate(out.flatten(0, 1), back)
    return out


def _told(keys: AnyKeys, blocks: int, width: int) -> Keys:
    """Keys whose bias says everything: ranges, absent rows, and rows outside the pool."""
    if not isinstance(keys, Keys):
        return dense(keys, blocks, width)
    there = dense(SeenKeys(keys.pool, keys.rows, None, keys.scales), blocks, width)
    return replace(there, bias=keys.bias + there.bias)
