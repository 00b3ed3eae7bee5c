"""Weights of rows at a temperature, computed in parts that stay in a processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int = npt.NDArray[np.int64]

# 8 rows of 129,280 values drawn one by one take 2.1 ms on a CPU, all at once 10.4 ms.
_CPU_VALUES = 1 << 17
# 256 MiB a buffer.
_GPU_VALUES = 1 << 26


class Tempering:
    """Splits rows in parts, and gives the weights of one part at a time.

    buffers  how many parts are alive at once
    """

    def __init__(self, vocab_size: int, device: torch.device, buffers: int = 1) -> None:
        values = _GPU_VALUES if device.type == "cuda" else _CPU_VALUES
        self.device = device
        self.rows = max(1, values // vocab_size)
        # On a CPU fresh pages would cost more than the arithmetic on them.
        count = 0 if device.type == "cuda" else buffers
        self._scratch = [torch.empty(self.rows, vocab_size) for _ in range(count)]

    def parts(self, rows: list[int]) -> list[list[int]]:
        """The rows in parts of at most `self.rows`; none where there are no rows."""
        return [rows[first : first + self.rows] for first in range(0, len(rows), self.rows)]

    def weights(
        self, logits: Tensor, rows: Sequence[int], temperatures: Tensor, buffer: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Largest logit of each row, float32 [n], and exp((logits - largest) / temperature), float32 [n, V].

        The weights of one part; they are valid until the buffer's next use.

        logits        float32 [R, V]; not changed
        rows          ascending
        temperatures  float32 [n]
        """
        out = self._scratch[buffer][: len(rows)] if self._scratch else None
        chosen = self.take(logits, rows, out)
        best = chosen.amax(-1)
        # The largest logit is taken off first, so that a tiny temperature can't overflow.
        weights = torch.sub(chosen, best[:, None], out=out)
        return best, weights.div_(temperatures[:, None]).exp_()

    def take(self, logits: Tensor, rows: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Ascending rows of the logits: a view where they are neighbours, else a copy, in `out` if given."""
        first, stop = rows[0], rows[-1] + 1
        if stop - first == len(rows):
            return logits[first:stop] if len(rows) < len(logits) else logits
        return torch.index_select(logits, 0, self.index(rows), out=out)

    def index(self, values: Sequence[int] | Int) -> Tensor:
        """Host numbers as an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)
