"""Rows on their way to the ranks that hold their experts, or their part of the vocabulary, and back.

All sizes that travel follow from the step's agreed row count, never from a rank's own: a rank without
requests sends padding and computes for the others. What comes back is one row for each choice of an expert,
zero where another rank holds it, and its own rank adds them in the order of choices: the sums, and their
rounding, are those of a single rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import ShapeMismatch
from engine.model.config import ModelConfig
from engine.model.expert_weights import MoeWeights
from engine.model.groups import Group
from engine.model.ops import TorchOps
from engine.model.weights import HeadWeights


@dataclass(frozen=True)
class ExpertRows:
    """Rows for this rank's experts: x [n, H]; ids [n, k], numbered from its first one; weights [n, k].

    An id that isn't among the rank's experts costs nothing and adds nothing.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor

    def arrived(self) -> Tensor:
        """The ids that this rank's experts get, once `Experts.run` was called."""
        return self.ids


class Experts(Protocol):
    """The way to the routed experts and back, in three stages."""

    def send(
        self, ops: TorchOps, x: Tensor, ids: Tensor, weights: Tensor, rows: int, moe: MoeWeights
    ) -> ExpertRows:
        """This rank's rows x [T, H] and choices [T, k] out, all ranks' rows in.

        ids   -1 for padding
        rows  what every rank brings, at least T
        moe   the experts that they go to
        """

    def run(self, ops: TorchOps, sent: ExpertRows, moe: MoeWeights, limit: float) -> Tensor:
        """What this rank's experts give."""

    def back(self, ops: TorchOps, sent: ExpertRows, given: Tensor, shared: Tensor) -> Tensor:
        """The sum over each of this rank's rows' experts, plus the shared one's rows [T, H]; their type.

        sent, given  what `send` and `run` gave
        """


class LocalExperts:
    """Every expert is here."""

    def send(
        self, ops: TorchOps, x: Tensor, ids: Tensor, weights: Tensor, rows: int, moe: MoeWeights
    ) -> ExpertRows:
        """As Experts.send."""
        return ExpertRows(x, ids, weights)

    def run(self, ops: TorchOps, sent: ExpertRows, moe: MoeWeights, limit: float) -> Tensor:
        """As Experts.run."""
        return ops.experts(sent.x, sent.ids, sent.weights, moe, limit)

    def back(self, ops: TorchOps, sent: ExpertRows, given: Tensor, shared: Tensor) -> Tensor:
        """As Experts.back."""
        return (given + shared).to(shared.dtype)


class SpreadExperts:
    """The experts are spread over a group; this rank's begin at `first`."""

    def __init__(self, group: Group, first: int) -> None:
        self.group, self.first = group, first

    def send(
        self, ops: TorchOps, x: Tensor, ids: Tensor, weights: Tensor, rows: int, moe: MoeWeights
    ) -> ExpertRows:
        """As Experts.send, in one collective: x, ids and weights of a row lie side by side as bytes."""
        if len(x) > rows:
            raise ShapeMismatch(f"{len(x)} rows, but the ranks agreed on {rows}")
        every = self.group.there.gather(ops.pack(x, ids, weights, rows)).flatten(0, 1)
        return ExpertRows(*ops.unpack(every, x, ids.shape[1], self.first))

    def run(self, ops: TorchOps, sent: ExpertRows, moe: MoeWeights, limit: float) -> Tensor:
        """As Experts.run: [n, k, H], a row for each choice."""
        return ops.expert_rows(sent.x, sent.ids, sent.weights, moe, limit)

    def back(self, ops: TorchOps, sent: ExpertRows, given: Tensor, shared: Tensor) -> Tensor:
        """As Experts.back."""
        return ops.join_choices(
            self.group.there.swap(given.view(self.group.size, -1, *given.shape[1:])), shared
        )


class Head(Protocol):
    """The end of the model: from streams to logits."""

    def logits(
        self, ops: TorchOps, streams: Tensor, head: HeadWeights, config: ModelConfig, rows: int
    ) -> Tensor:
        """streams [R, hc, H] to logits [R, V] float32; `rows` is what every rank brings, at least R."""


class LocalHead:
    """The whole vocabulary is here."""

    def logits(
        self, ops: TorchOps, streams: Tensor, head: HeadWeights, config: ModelConfig, rows: int
    ) -> Tensor:
        """As Head.logits."""
        return ops.logits(streams, head, config.hc_eps, config.rms_norm_eps)


class SplitHead:
    """The vocabulary is split over a group, in rank order."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def logits(
        self, ops: TorchOps, streams: Tensor, head: HeadWeights, config: ModelConfig, rows: int
    ) -> Tensor:
        """As Head.logits: all ranks' rows in, this rank's part of everybody's logits out."""
        count = streams.shape[0]
        if count > rows:
            raise ShapeMismatch(f"{count} rows need logits, but the ranks agreed on {rows}")
        out = torch.zeros(rows, config.hidden_size, device=streams.device)
        if count:
            out[:count] = ops.head_rows(streams, head, config.hc_eps, config.rms_norm_eps)
        part = ops.project(self.group.there.gather(out).flatten(0, 1), head.head)
        mine = self.group.there.swap(part.view(self.group.size, rows, -1))
        return mine[:, :count].transpose(0, 1).reshape(count, config.vocab_size)
