"""Heads beside a block draft: the Markov bias of the previous token, and the confidence in each position.

With x the previous token, W1[x] its embedding of rank r and h the block row's hidden state, the bias of a
position's logits is W2 e, where e is
    vanilla  W1[x]
    gated    sigmoid(Wg [h; W1[x]] + bg) * W1[x]
    rnn      tanh(o), from (g, c, o) = W [s; W1[x]; h] + b and s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.ops import TorchOps

# Values of a vector of any processor, at most.
VECTOR = 32


def whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function`, an elementwise one, of x: each value with the same bits wherever it stands.

    torch computes the last few values of a tensor otherwise than full vectors; here none of x's is last.
    """
    return function(F.pad(x.flatten(), (0, VECTOR)))[: x.numel()].view(x.shape)


@dataclass(frozen=True)
class MarkovWeights:
    """w1 [V, r] and w2 [V, r]; mix is Wg [r, H + r] of "gated", W [3 r, 2 r + H] of "rnn", with its bias."""

    kind: str
    w1: Tensor
    w2: Tensor
    mix: Tensor | None
    mix_bias: Tensor | None


class MarkovHead:
    """The bias, position by position. State is s [B, r] float32."""

    def __init__(self, ops: TorchOps, weights: MarkovWeights) -> None:
        self.ops, self.weights = ops, weights

    def start(self, requests: int) -> Tensor:
        """The state before the first position."""
        return torch.zeros(requests, self.weights.w1.shape[1], device=self.weights.w1.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """W1 of tokens [B]; [B, r] float32."""
        return self.weights.w1.index_select(0, tokens).float()

    def bias(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(bias [B, V] float32, next state); embedded [B, r], hidden [B, H] float32."""
        if self.weights.kind == "gated":
            gate = whole_vectors(torch.sigmoid, self._mix(torch.cat([hidden, embedded], dim=1)))
            embedded = gate * embedded
        elif self.weights.kind == "rnn":
            mixed = self._mix(torch.cat([state, embedded, hidden], dim=1))
            gate, candidate, out = mixed.chunk(3, dim=1)
            gate, candidate = whole_vectors(torch.sigmoid, gate), whole_vectors(torch.tanh, candidate)
            state = gate * state + (1 - gate) * candidate
            embedded = whole_vectors(torch.tanh, out)
        return self.ops.linear(embedded, self.weights.w2).float(), state

    def _mix(self, x: Tensor) -> Tensor:
        assert self.weights.mix is not None
        assert self.weights.mix_bias is not None
        return self.ops.linear(x, self.weights.mix).float() + self.weights.mix_bias


class Confidence:
    """Probability that each position is accepted given that those before it are, and its running product.

    proj          [1, H + r] float32, or [1, H] where the head doesn't see the Markov embedding
    temperatures  [gamma] float32, divisors of the logits
    """

    def __init__(self, ops: TorchOps, proj: Tensor, temperatures: Tensor) -> None:
        self.ops, self.proj, self.temperatures = ops, proj, temperatures

    def logits(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Uncalibrated logits [gamma, B] from hidden [gamma, B, H] and embedded [gamma, B, r], float32."""
        wide = hidden.shape[-1] < self.proj.shape[1]
        x = torch.cat([hidden, embedded], dim=-1) if wide else hidden
        return self.ops.linear(x.flatten(0, 1), self.proj).view(hidden.shape[:2])

    def survival(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """[B, gamma] float32; arguments as of `logits`."""
        calibrated = self.logits(hidden, embedded) / self.temperatures.unsqueeze(1)
        return whole_vectors(torch.sigmoid, calibrated).cumprod(0).t().contiguous()
