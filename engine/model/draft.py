"""What a draft model is to the runner: rows that it learns from, rows that it drafts for, and the drafts.

L is a request's committed length: positions 0 to L - 1 have target KV, the anchor (the last emitted token) is
at L and has none. A draft model sees a request through *taps*: what the target's layers gave for its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.draft_ring import DraftState
from engine.model.group_stats import GroupStats

Int = npt.NDArray[np.int64]

Choose = Callable[[int, Tensor], Tensor]
"""(k, z [B, V] float32) -> ids [B] int64: picks draft token k + 1 from its logits."""


@runtime_checkable
class BlockChoose(Protocol):
    """A Choose that can also take a whole block whose logits are biased by one matrix product a token."""

    def __call__(self, k: int, z: Tensor) -> Tensor:
        """As Choose."""

    def block(self, logits: Tensor, anchors: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, GroupStats]:
        """Ids [B, gamma] int64, each from its logits and the bias W2 W1[token before it], and statistics.

        The statistics are of the biased logits, rows [gamma * B] position by position.

        logits   [gamma, B, V] float32 in one piece; the biases are added in place
        anchors  [B] int64, the tokens before the first
        w1, w2   [V, r]
        """


def greedy(k: int, z: Tensor) -> Tensor:
    """The likeliest token, of equal ones the first."""
    return z.argmax(1)


@dataclass(frozen=True)
class InjectRows:
    """Committed rows whose taps enter the draft's KV.

    slots        [n] int64; slot 0 is a sink, for padding
    positions    [n] int64, below the committed length; at most the last 128 of a slot in one call
    next_tokens  [n] int64, the token at position + 1 (the anchor for row L - 1); only a drafter with
                 `needs_next_tokens` reads it
    """

    slots: Tensor
    positions: Tensor
    next_tokens: Tensor | None = None


@dataclass(frozen=True)
class DraftRows:
    """Requests to draft for; B may be 0.

    slots       [B]
    lengths     [B], committed length L; every row of max(valid_from, L - 128) .. L - 1 has been injected
    valid_from  [B], first position that the slot's KV holds: nothing before it is looked at
    anchors     [B] int64 on the device
    """

    slots: Int
    lengths: Int
    valid_from: Int
    anchors: Tensor


@dataclass(frozen=True)
class Drafted:
    """Drafts of B requests.

    ids       [B, gamma] int64
    survival  [B, gamma] float32, the estimated probability that positions 1 .. k are all accepted
    logits    [B, gamma, V] float32, what was chosen from; None unless asked for
    stats     of these logits, where the choosing left them: rows [gamma * B] position by position
    """

    ids: Tensor
    survival: Tensor
    logits: Tensor | None
    stats: GroupStats | None = None


class Drafter(Protocol):
    """A draft model.

    block              gamma, tokens of a draft
    taps               what the target captures, in this order: layer `tap`'s output, the mean of its streams;
                       from num_hidden_layers on, stream `tap - num_hidden_layers` of the last layer's output
    needs_next_tokens  whether `inject` reads InjectRows.next_tokens
    rereads_logits     whether the survival is read of logits that tokens were chosen from
    """

    block: int
    taps: tuple[int, ...]
    needs_next_tokens: bool
    rereads_logits: bool

    @property
    def weights(self) -> object:
        """What it holds, dataclasses of tensors: for accounts of memory."""

    def new_state(self, slots: int) -> DraftState:
        """KV of `slots` request slots, the sink included. What a slot held before is never looked at."""

    def inject(self, state: DraftState, rows: InjectRows, taps: Tensor) -> None:
        """Projects committed rows into the KV; taps [len(self.taps), n, H]. Nothing is read by the host."""

    def draft(
        self, state: DraftState, rows: DraftRows, choose: Choose = greedy, *, keep_logits: bool = False
    ) -> Drafted:
        """Drafts a block for every request. Injected rows stay as they are."""


def nothing(block: int, vocab_size: int, device: torch.device, *, keep_logits: bool) -> Drafted:
    """The drafts of no request."""
    ids = torch.empty(0, block, dtype=torch.int64, device=device)
    logits = torch.empty(0, block, vocab_size, device=device) if keep_logits else None
    return Drafted(ids, torch.empty(0, block, device=device), logits)
