"""DeepSeek-V4 written a second time, as plainly as possible: one sequence, no cache, no engine code.

It exists for what transformers doesn't do: rounding of cached values as released weights were trained with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_GRID = torch.tensor(
    sorted(
        {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)}
    )[:-1]
)
E2M1_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nearest(x: Tensor, grid: Tensor, *, even: bool) -> Tensor:
    """Each |x| to the nearest grid value; ties to the value of even index, or towards zero; sign kept."""
    size = x.abs()
    high = torch.searchsorted(grid, size).clamp(1, len(grid) - 1)
    low = high - 1
    up, down = grid[high] - size, size - grid[low]
    tie_up = (high % 2 == 0) if even else torch.zeros_like(size, dtype=torch.bool)
    return torch.where((up < down) | ((up == down) & tie_up), grid[high], grid[low]) * x.sign()


def rounded(x: Tensor, group: int, grid: Tensor, least: float, *, even: bool) -> Tensor:
    """x [n, width] on `grid`, with a power-of-two scale a group of channels."""
    parts = x.reshape(x.shape[0], -1, group)
    top = float(grid[-1])
    scale = 2.0 ** torch.ceil(torch.log2(parts.abs().amax(-1, keepdim=True).clamp_min(least).double() / top))
    return (nearest((parts / scale).float(), grid, even=even) * scale).float().reshape(x.shape)


class Dense:
    """fields is a parsed config.json; weights have DeepSeek's names."""

    def __init__(self, fields: dict[str, Any], weights: dict[str, Tensor], *, rounding: bool) -> None:
        self.f, self.w, self.rounding = fields, weights, rounding

    def logits(self, tokens: list[int]) -> Tensor:
        """[n, V]."""
        ids = torch.tensor(tokens)
        streams = self.w["embed.weight"][ids].unsqueeze(1).repeat(1, self.f["hc_mult"], 1)
        for layer in range(self.f["num_hidden_layers"]):
            p = f"layers.{layer}."
            u, post, comb = self.enter(streams, p + "hc_attn_")
            y = self.attention(self.norm(u, p + "attn_norm.weight"), layer)
            streams = post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjh->tkh", comb, streams)
            u, post, comb = self.enter(streams, p + "hc_ffn_")
            y = self.moe(self.norm(u, p + "ffn_norm.weight"), ids, layer)
            streams = post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjh->tkh", comb, streams)
        mix = self.mixed(streams, "hc_head_")
        weights = torch.sigmoid(mix * self.w["hc_head_scale"] + self.w["hc_head_base"]) + self.f["hc_eps"]
        return self.norm((weights.unsqueeze(2) * streams).sum(1), "norm.weight") @ self.w["head.weight"].T

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.f["rms_norm_eps"])
        return scaled if name is None else scaled * self.w[name]

    def mixed(self, streams: Tensor, prefix: str) -> Tensor:
        return self.norm(streams.flatten(1), None) @ self.w[prefix + "fn"].T

    def enter(self, streams: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        hc, eps = self.f["hc_mult"], self.f["hc_eps"]
        mix, scale, base = self.mixed(streams, prefix), self.w[prefix + "scale"], self.w[prefix + "base"]
        pre = torch.sigmoid(mix[:, :hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(mix[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (mix[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(-1, hc, hc).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.f["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return (pre.unsqueeze(2) * streams).sum(1), post, comb

    def rope(self, x: Tensor, positions: Tensor, ratio: int, sign: int = 1) -> Tensor:
        """x [n, ..., D] with its last channels rotated."""
        dim, theta = self.f["qk_rope_head_dim"], self.f["compress_rope_theta" if ratio else "rope_theta"]
        out = x.clone()
        for pair in range(dim // 2):
            rate = theta ** (-2 * pair / dim)
            if ratio:
                low, high = self.ramp_edges()
                ramp = min(max((pair - low) / (high - low), 0), 1)
                rate = rate / self.f["rope_scaling"]["factor"] * ramp + rate * (1 - ramp)
            angle = (positions.double() * rate * sign).view(-1, *[1] * (x.dim() - 2))
            first, second = x[..., -dim + 2 * pair].double(), x[..., -dim + 2 * pair + 1].double()
            out[..., -dim + 2 * pair] = first * angle.cos() - second * angle.sin()
            out[..., -dim + 2 * pair + 1] = first * angle.sin() + second * angle.cos()
        return out

    def ramp_edges(self) -> tuple[int, int]:
        """Pairs between which YaRN goes from no stretching to full stretching."""
        yarn, dim = self.f["rope_scaling"], self.f["qk_rope_head_dim"]
        reach = yarn["original_max_position_embeddings"] / (2 * math.pi)
        octave = 2 * math.log(self.f["compress_rope_theta"])
        low, high = (dim * math.log(reach / yarn[name]) / octave for name in ("beta_fast", "beta_slow"))
        return max(math.floor(low), 0), min(math.ceil(high), dim - 1)

    def latent_rounded(self, x: Tensor) -> Tensor:
        nope = self.f["head_dim"] - self.f["qk_rope_head_dim"]
        if not self.rounding:
            return x
        return torch.cat([rounded(x[:, :nope], 64, E4M3_GRID, 1e-4, even=True), x[:, nope:]], 1)

    def index_rounded(self, x: Tensor) -> Tensor:
        """x [n, Di]: each pair of bit patterns (i, j) has sign (-1)^popcount(i & j)."""
        if not self.rounding:
            return x
        width = x.shape[1]
        signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
        return rounded(x @ (signs * width**-0.5), 32, E2M1_GRID, 6 * 2.0**-126, even=False)

    def entries(self, x: Tensor, prefix: str, ratio: int, width: int) -> Tensor:
        """Compressed entries [windows, width], before rounding."""
        latents, gates = x @ self.w[prefix + "wkv.weight"].T, x @ self.w[prefix + "wgate.weight"].T
        rows = []
        for window in range(len(x) // ratio):
            own = slice(window * ratio, (window + 1) * ratio)
            value, score = latents[own], gates[own] + self.w[prefix + "ape"]
            if ratio == 4:
                before = slice(own.start - 4, own.start)
                value, score = value[:, width:], score[:, width:]
                if window:
                    value = torch.cat([latents[before, :width], value])
                    score = torch.cat([gates[before, :width] + self.w[prefix + "ape"][:, :width], score])
            rows.append((score.softmax(0) * value).sum(0))
        stacked = torch.stack(rows) if rows else x.new_zeros(0, width)
        return self.rope(self.norm(stacked, prefix + "norm.weight"), torch.arange(len(rows)) * ratio, ratio)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        f, p, ratio = self.f, f"layers.{layer}.attn.", self.f["compress_ratios"][layer]
        n, wide, at = len(x), f["head_dim"], torch.arange(len(x))
        lora = self.norm(x @ self.w[p + "wq_a.weight"].T, p + "q_norm.weight")
        q = self.norm((lora @ self.w[p + "wq_b.weight"].T).view(n, -1, wide), None)
        q = self.rope(q, at, ratio)
        latent = self.norm(x @ self.w[p + "wkv.weight"].T, p + "kv_norm.weight")
        keys = self.latent_rounded(self.rope(latent, at, ratio))
        seen = (at.unsqueeze(1) >= at) & (at.unsqueeze(1) - at < f["sliding_window"])
        if ratio:
            entries = self.latent_rounded(self.entries(x, p + "compressor.", ratio, wide))
            closed = torch.arange(len(entries)) < ((at + 1) // ratio).unsqueeze(1)
            if ratio == 4:
                closed &= self.selected(x, lora, p + "indexer.", closed)
            keys, seen = torch.cat([keys, entries]), torch.cat([seen, closed], 1)
        scores = (torch.einsum("thd,kd->thk", q, keys) * wide**-0.5).masked_fill(
            ~seen.unsqueeze(1), -torch.inf
        )
        sink = self.w[p + "attn_sink"].view(1, -1, 1).expand(n, -1, 1)
        weights = torch.cat([scores, sink], 2).softmax(2)[..., :-1]
        out = self.rope(torch.einsum("thk,kd->thd", weights, keys), at, ratio, sign=-1)
        groups, rank = f["o_groups"], f["o_lora_rank"]
        low = torch.einsum(
            "tgw,grw->tgr", out.view(n, groups, -1), self.w[p + "wo_a.weight"].view(groups, rank, -1)
        )
        return low.flatten(1) @ self.w[p + "wo_b.weight"].T

    def selected(self, x: Tensor, lora: Tensor, p: str, closed: Tensor) -> Tensor:
        """Mask [n, entries] of the index_topk best."""
        heads, width = self.f["index_n_heads"], self.f["index_head_dim"]
        q = self.rope(
            (lora @ self.w[p + "wq_b.weight"].T).view(len(x), heads, width), torch.arange(len(x)), 4
        )
        q = self.index_rounded(q.flatten(0, 1)).view(len(x), heads, width)
        keys = self.index_rounded(self.entries(x, p + "compressor.", 4, width))
        weights = x @ self.w[p + "weights_proj.weight"].T * (width * heads) ** -0.5
        scores = (torch.einsum("thd,kd->thk", q, keys).relu() * weights.unsqueeze(2)).sum(1)
        best = scores.masked_fill(~closed, -torch.inf).topk(min(self.f["index_topk"], len(keys))).indices
        return torch.zeros_like(closed).scatter_(1, best, torch.ones_like(best, dtype=torch.bool))

    def expert(self, x: Tensor, prefix: str) -> Tensor:
        limit = self.f["swiglu_limit"]
        gate = (x @ self.w[prefix + "w1.weight"].T).clamp(max=limit)
        up = (x @ self.w[prefix + "w3.weight"].T).clamp(-limit, limit)
        return (F.silu(gate) * up) @ self.w[prefix + "w2.weight"].T

    def moe(self, x: Tensor, ids: Tensor, layer: int) -> Tensor:
        p = f"layers.{layer}.ffn."
        scores = F.softplus(x @ self.w[p + "gate.weight"].T).sqrt()
        if layer < self.f["num_hash_layers"]:
            chosen = self.w[p + "gate.tid2eid"][ids]
        else:
            chosen = (scores + self.w[p + "gate.bias"]).topk(self.f["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * self.f["routed_scaling_factor"]
        out = self.expert(x, p + "shared_experts.")
        for expert in range(self.f["n_routed_experts"]):
            share = (weights * (chosen == expert)).sum(1, keepdim=True)
            out = out + share * self.expert(x, f"{p}experts.{expert}.")
        return out
