"""The mixture of experts, computed densely: all experts and the shared one as a single wide MLP.

With 8 experts of 256 x 256 the wasted arithmetic is a few percent of a step, while sorting tokens by expert
would cost more memory traffic than it saves. Unchosen experts have weight zero.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.geometry import Geometry


def hash_table(counts: Sequence[int], experts: int, chosen: int, seed: int) -> Tensor:
    """A fixed choice of distinct experts for each token id, balanced by how often the ids occur.

    counts   occurrences of each id in the corpus
    returns  [len(counts), chosen] int64
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(len(counts), chosen, dtype=torch.int64)
    load = torch.zeros(experts, dtype=torch.float64)
    for token in sorted(range(len(counts)), key=lambda t: (-counts[t], t)):
        # The jitter breaks ties, so that pairs of experts are mixed rather than always the same.
        jitter = torch.rand(experts, generator=generator, dtype=torch.float64) * (1 + load.mean() * 1e-3)
        table[token] = torch.topk(load + jitter, chosen, largest=False).indices
        load[table[token]] += counts[token] + 1e-3
    return table


class Gate(nn.Module):
    """Square-root-softplus scores; the choice is by token id in hash layers, else by score plus bias."""

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, geometry: Geometry, hashed: bool) -> None:
        super().__init__()
        self.geometry = geometry
        self.hashed = hashed
        self.weight = nn.Parameter(torch.empty(geometry.num_experts, geometry.hidden_size))
        if hashed:
            shape = (geometry.vocab_size, geometry.experts_per_token)
            first = torch.arange(geometry.experts_per_token).expand(shape).clone()
            self.register_buffer("tid2eid", first)
        else:
            self.register_buffer("bias", torch.zeros(geometry.num_experts))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [T, E] float32, zero for unchosen experts, and the number of tokens each expert got [E]."""
        g = self.geometry
        scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        chosen = self._by_id(ids) if self.hashed else self._by_score(scores.detach())
        kept = scores * chosen
        weights = kept / (kept.sum(-1, keepdim=True) + 1e-20) * g.routed_scaling_factor
        return weights, chosen.sum(0)

    def _by_id(self, ids: Tensor) -> Tensor:
        experts = torch.arange(self.geometry.num_experts, device=ids.device)
        return (self.tid2eid[ids][:, :, None] == experts).any(1).float()

    def _by_score(self, scores: Tensor) -> Tensor:
        # Counting better rivals fuses with its surroundings; a library top-k of eight numbers does not.
        biased = scores + self.bias
        experts = torch.arange(biased.shape[-1], device=scores.device)
        earlier = experts[None, :] < experts[:, None]
        mine, rival = biased[:, :, None], biased[:, None, :]
        better = (rival > mine) | ((rival == mine) & earlier)
        return (better.sum(-1) < self.geometry.experts_per_token).float()


class Experts(nn.Module):
    """All routed experts as stacks [E, ...] and the shared expert."""

    def __init__(self, geometry: Geometry, hashed: bool) -> None:
        super().__init__()
        g = self.geometry = geometry
        self.gate = Gate(g, hashed)
        self.w1 = nn.Parameter(torch.empty(g.num_experts, g.expert_width, g.hidden_size))
        self.w2 = nn.Parameter(torch.empty(g.num_experts, g.hidden_size, g.expert_width))
        self.w3 = nn.Parameter(torch.empty(g.num_experts, g.expert_width, g.hidden_size))
        self.shared_w1 = nn.Parameter(torch.empty(g.expert_width, g.hidden_size))
        self.shared_w2 = nn.Parameter(torch.empty(g.hidden_size, g.expert_width))
        self.shared_w3 = nn.Parameter(torch.empty(g.expert_width, g.hidden_size))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Output [T, H] of x [T, H] and ids [T], and the experts' loads [E]."""
        g = self.geometry
        weights, load = self.gate(x, ids)
        weights = F.pad(weights, (0, 1), value=1.0)
        up = torch.cat((self.w1.flatten(0, 1), self.shared_w1, self.w3.flatten(0, 1), self.shared_w3))
        down = torch.cat((self.w2.transpose(0, 1).flatten(1), self.shared_w2), 1)
        hidden = F.linear(x, up).view(x.shape[0], 2, g.num_experts + 1, g.expert_width).float()
        gate = hidden[:, 0].clamp(max=g.swiglu_limit)
        linear = hidden[:, 1].clamp(-g.swiglu_limit, g.swiglu_limit)
        active = (F.silu(gate) * linear * weights[:, :, None]).to(x.dtype)
        return F.linear(active.flatten(1), down), load
