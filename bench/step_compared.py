"""Two kernel sets on the same inputs, operation by operation, through a whole forward.

The forward goes on with what is right, so that one operation's rounding isn't taken for another's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.model.coded_rows import values_of
from engine.model.latent_rows import unpack_rows
from engine.model.ops import TorchOps
from engine.model.row_layout import layout_of

PURE = (
    "linear", "project", "group_linear", "rms_norm", "norm_rows", "mhc_pre", "mhc_next", "mhc_post",
    "collapse", "head_rows", "attend_back", "index_queries", "index_scores", "select_rows", "experts",
    "expert_rows", "join_choices", "shared_expert", "pack", "unpack",
)  # fmt: skip
WRITING = {
    "linear_to": 4,
    "rotate": 0,
    "keep_latent": 3,
    "close_c4": 6,
    "close_c128": 6,
    "commit_c4": 0,
    "commit_c128": 0,
}
"""Place of the argument that an operation writes."""
INTO_INPUT = ("index_queries",)
"""They may write their first argument."""
SINK_ROWS = {"commit_c4": 8, "commit_c128": 1}
"""Rows of slot 0."""
SELECTING = ("select", "select_in_order")


class ComparedOps(TorchOps):
    """Each call runs on both sets; `own` is judged by `right`, whose result counts.

    worst  by operation the largest distance of one call: norm of the difference over the norm
    calls  by operation
    """

    name = "compared"

    def __init__(self, own: TorchOps, right: TorchOps) -> None:
        self.own, self.right = own, right
        self.keeps, self.dense_entries, self.ranged = own.keeps, own.dense_entries, own.ranged
        self.worst: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        for name in PURE:
            setattr(self, name, self._pure(name))
        for name, place in WRITING.items():
            setattr(self, name, self._writing(name, place))
        for name in SELECTING:
            setattr(self, name, self._selecting(name))

    def norm_rotate(self, x: Tensor, turns: Tensor, eps: float, rows: Tensor | None = None) -> Tensor:
        """As TorchOps.norm_rotate."""
        own, right = (ops.norm_rotate(x.clone(), turns, eps, rows) for ops in (self.own, self.right))
        self._note("norm_rotate", own, right)
        return right

    def route(
        self, x: Tensor, token_ids: Tensor, moe: Any, count: int, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """As TorchOps.route; compared by the weight that each expert gets."""
        both = [ops.route(x, token_ids, moe, count, scaling) for ops in (self.own, self.right)]
        spread = [
            torch.zeros(len(x), len(moe.gate), device=x.device).scatter_(1, ids.long(), weights)
            for ids, weights in both
        ]
        self._note("route", *spread)
        return both[1]

    def _pure(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            # Queries are turned in place.
            mine = [a.clone() if isinstance(a, Tensor) else a for a in args] if name in INTO_INPUT else args
            own, right = getattr(self.own, name)(*mine), getattr(self.right, name)(*args)
            pairs = zip(own, right, strict=True) if isinstance(right, tuple) else [(own, right)]
            for pair in pairs:
                self._note(name, *map(values_of, pair))
            return right

        return call

    def _writing(self, name: str, place: int) -> Callable[..., None]:
        def call(*args: Any) -> None:
            target = args[place]
            targets = target if isinstance(target, tuple) else (target,)
            copies = tuple(tensor.clone() for tensor in targets)
            own = list(args)
            own[place] = copies if isinstance(target, tuple) else copies[0]
            getattr(self.own, name)(*own)
            getattr(self.right, name)(*args)
            rows = None
            if name == "keep_latent":
                rows = args[4]
            elif name.startswith("close"):
                rows = args[2].out_rows
            if name.startswith("commit"):
                # Slot 0 is the sink: anything may stand there.
                beside = SINK_ROWS[name]
                copies, targets = (copies[0][:, beside:],), (target[:, beside:],)
            wide = _channels(name, args)
            if rows is not None:
                copies, targets = (_numbers(some, rows, wide) for some in (copies, targets))
            for copy, tensor in zip(copies, targets, strict=True):
                self._note(name, copy, tensor)

        return call

    def _selecting(self, name: str) -> Callable[..., Tensor]:
        def call(scores: Tensor, count: int) -> Tensor:
            own, right = (getattr(ops, name)(scores, count) for ops in (self.own, self.right))
            chosen = [scores.gather(-1, ids).sort(dim=-1).values for ids in (own, right)]
            self._note(name, *chosen)
            return right

        return call

    def _note(self, name: str, own: Tensor, right: Tensor) -> None:
        # What isn't seen is minus infinity on both sides, or one of them is wrong by far.
        own, right = (t.double().nan_to_num(nan=torch.inf, neginf=-1e6) for t in (own, right))
        apart = float((own - right).norm() / right.norm().clamp_min(1e-30)) if right.numel() else 0.0
        self.worst[name] = max(self.worst.get(name, 0.0), apart)
        self.calls[name] = self.calls.get(name, 0) + 1


def _channels(name: str, args: tuple[Any, ...]) -> int:
    """Of the latents that an operation writes; 0 where it writes none."""
    if name == "keep_latent":
        return args[0].shape[1]
    if not name.startswith("close"):
        return 0
    norm = args[4]
    return (norm[0] if isinstance(norm, tuple) else norm).shape[0]


def _numbers(pools: tuple[Tensor, ...], rows: Tensor, wide: int) -> tuple[Tensor, ...]:
    """Rows of pools as numbers: latents of so many channels, and index keys with their scales, if any."""
    own = [
        pool.view(torch.uint8)[rows].view(pool.dtype) if pool.element_size() == 1 else pool[rows]
        for pool in pools
    ]
    if wide and own[0].dtype == torch.uint8:
        own[0] = unpack_rows(own[0], layout_of(wide, own[0].shape[1]))
    if len(own) == 3:
        return own[0], own[1].float() * own[2].unsqueeze(1)
    return tuple(own)
