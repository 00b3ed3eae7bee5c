"""Both kinds of draft written a second time, as plainly as possible: one request, whole history, no ring.

Every attention is dense over all rows that the request ever had, with a mask; a block is computed row by row
where the definition is. Built on the plain backbone of the golden tests; no code of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.golden.dense import Dense

Pick = Callable[[int, Tensor], int]


def likeliest(k: int, z: Tensor) -> int:
    """The greedy choice."""
    return int(z.argmax())


class DraftReference(Dense):
    """What both kinds share. Weights are given in float64: the reference rounds nothing."""

    def __init__(self, fields: dict[str, Any], weights: dict[str, Tensor], *, rounding: bool = False) -> None:
        super().__init__(
            fields, {name: tensor.double() for name, tensor in weights.items()}, rounding=rounding
        )

    def latent(self, x: Tensor, positions: Tensor, prefix: str) -> Tensor:
        """Latents [n, D] of normalised inputs x [n, H] at their positions."""
        kv = self.norm(x @ self.w[prefix + "attn.wkv.weight"].T, prefix + "attn.kv_norm.weight")
        return self.latent_rounded(self.rope(kv, positions, 0))

    def block_attention(
        self, x: Tensor, positions: Tensor, keys: Tensor, seen: Tensor, prefix: str
    ) -> Tensor:
        """x [n, H] over keys [m, D]; seen [n, m]."""
        f, p, n, wide = self.f, prefix + "attn.", len(x), self.f["head_dim"]
        lora = self.norm(x @ self.w[p + "wq_a.weight"].T, p + "q_norm.weight")
        q = self.norm((lora @ self.w[p + "wq_b.weight"].T).view(n, -1, wide), None)
        q = self.rope(q, positions, 0)
        out = torch.zeros_like(q)
        for row in range(n):
            mine = keys[seen[row]]
            for head in range(q.shape[1]):
                scores = torch.cat([mine @ q[row, head] * wide**-0.5, self.w[p + "attn_sink"][head].view(1)])
                out[row, head] = scores.softmax(0)[:-1] @ mine
        out = self.rope(out, positions, 0, sign=-1)
        groups, rank = f["o_groups"], f["o_lora_rank"]
        wo_a = self.w[p + "wo_a.weight"].view(groups, rank, -1)
        low = torch.stack([out.view(n, groups, -1)[:, g] @ wo_a[g].T for g in range(groups)], 1)
        return low.flatten(1) @ self.w[p + "wo_b.weight"].T

    def stage_experts(self, x: Tensor, prefix: str, experts: int, count: int) -> Tensor:
        p, rows = prefix + "ffn.", []
        for row in x:
            scores = torch.nn.functional.softplus(self.w[p + "gate.weight"] @ row).sqrt()
            chosen = (scores + self.w[p + "gate.bias"]).topk(count).indices.tolist()
            assert max(chosen) < experts
            total = sum(float(scores[e]) for e in chosen)
            out = self.expert(row, p + "shared_experts.")
            for e in chosen:
                weight = float(scores[e]) / total * self.f["routed_scaling_factor"]
                out = out + weight * self.expert(row, f"{p}experts.{e}.")
            rows.append(out)
        return torch.stack(rows)

    def layer(
        self,
        streams: Tensor,
        positions: Tensor,
        attend: Callable[[Tensor], tuple[Tensor, Tensor]],
        prefix: str,
    ) -> Tensor:
        """Streams [n, hc, H] after a layer; `attend` gives keys and mask from the normalised inputs."""
        experts = self.f.get("dspark_n_routed_experts") or self.f["n_routed_experts"]
        count = self.f.get("dspark_num_experts_per_tok") or self.f["num_experts_per_tok"]
        u, post, comb = self.enter(streams, prefix + "hc_attn_")
        x = self.norm(u, prefix + "attn_norm.weight")
        y = self.block_attention(x, positions, *attend(x), prefix)
        streams = post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjh->tkh", comb, streams)
        u, post, comb = self.enter(streams, prefix + "hc_ffn_")
        y = self.stage_experts(self.norm(u, prefix + "ffn_norm.weight"), prefix, experts, count)
        return post.unsqueeze(2) * y.unsqueeze(1) + torch.einsum("tjk,tjh->tkh", comb, streams)

    def collapsed(self, streams: Tensor, prefix: str) -> Tensor:
        scale, base = self.w[prefix + "hc_head_scale"], self.w[prefix + "hc_head_base"]
        gates = torch.sigmoid(self.mixed(streams, prefix + "hc_head_") * scale + base) + self.f["hc_eps"]
        return (gates.unsqueeze(2) * streams).sum(1)


class DSparkReference(DraftReference):
    """Three stages over a block."""

    stages = 3

    def draft(
        self, history: Tensor, valid_from: int, anchor: int, gamma: int, pick: Pick = likeliest
    ) -> tuple[list[int], Tensor, Tensor]:
        """(tokens, survival [gamma], logits [gamma, V]).

        history  [K, L, H] taps of every committed row; those before `valid_from` aren't looked at
        """
        length, last = history.shape[1], f"mtp.{self.stages - 1}."
        joined = torch.cat(list(history.double()), dim=1)
        main_x = self.norm(joined @ self.w["mtp.0.main_proj.weight"].T, "mtp.0.main_norm.weight")
        ids = torch.tensor([anchor] + [self.f["dspark_noise_token_id"]] * (gamma - 1))
        positions, before = torch.arange(length, length + gamma), torch.arange(length)
        streams = self.w["embed.weight"][ids].unsqueeze(1).repeat(1, self.f["hc_mult"], 1)
        near = (before >= valid_from) & (before >= length - self.f["sliding_window"])
        seen = torch.cat([near, torch.ones(gamma, dtype=torch.bool)]).expand(gamma, -1)
        for stage in range(self.stages):
            prefix = f"mtp.{stage}."
            context = self.latent(main_x, before, prefix)

            def keys(x: Tensor, context: Tensor = context, prefix: str = prefix) -> tuple[Tensor, Tensor]:
                return torch.cat([context, self.latent(x, positions, prefix)]), seen

            streams = self.layer(streams, positions, keys, prefix)
        hidden = self.collapsed(streams, last)
        return self.chain(
            hidden, self.norm(hidden, last + "norm.weight") @ self.w["head.weight"].T, anchor, pick
        )

    def chain(
        self, hidden: Tensor, base: Tensor, anchor: int, pick: Pick
    ) -> tuple[list[int], Tensor, Tensor]:
        """Token by token, from hidden [gamma, H] and base logits [gamma, V]."""
        last = f"mtp.{self.stages - 1}."
        w1, w2 = (self.w[f"{last}markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        table = self.f.get("dspark_sts_temperatures", [])
        previous, alive, state = anchor, 1.0, torch.zeros(w1.shape[1], dtype=torch.float64)
        tokens, survival, logits = [], [], []
        for k, (h, u) in enumerate(zip(hidden, base, strict=True)):
            embedded = w1[previous]
            if self.f.get("enable_confidence_head", True):
                seen = torch.cat([h, embedded]) if self.f.get("confidence_head_with_markov", True) else h
                logit = self.w[f"{last}confidence_head.proj.weight"][0] @ seen
                alive *= float(torch.sigmoid(logit / (table[k] if k < len(table) else 1.0)))
            kind = self.f.get("dspark_markov_head_type", "vanilla")
            if kind == "gated":
                g = self.affine(f"{last}markov_head.gate_proj", torch.cat([h, embedded]))
                embedded = torch.sigmoid(g) * embedded
            if kind == "rnn":
                g, c, o = self.affine(f"{last}markov_head.joint_proj", torch.cat([state, embedded, h])).chunk(
                    3
                )
                state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                embedded = torch.tanh(o)
            z = u + w2 @ embedded
            previous = pick(k, z)
            tokens.append(previous)
            survival.append(alive)
            logits.append(z)
        return tokens, torch.tensor(survival, dtype=torch.float64), torch.stack(logits)

    def affine(self, name: str, x: Tensor) -> Tensor:
        return self.w[name + ".weight"] @ x + self.w[name + ".bias"]


class ClassicReference(DraftReference):
    """One module, run over the whole history again for every token."""

    def draft(
        self, history: Tensor, tokens: list[int], valid_from: int, gamma: int, pick: Pick = likeliest
    ) -> tuple[list[int], Tensor, Tensor]:
        """(drafted tokens, survival [gamma], logits [gamma, V]).

        history  [hc, L, H]: the target's last streams of every committed row
        tokens   the token after each of those rows, L of them; the last is the anchor
        """
        rows, alive = history.double().transpose(0, 1), 1.0
        known, drafted, survival, logits = list(tokens), [], [], []
        for k in range(gamma):
            x = self.module_input(rows, known)
            at = torch.arange(len(x))
            near = (at >= valid_from) & (at >= len(x) - self.f["sliding_window"])

            u, _, _ = self.enter(x, "mtp.0.hc_attn_")
            keys = self.latent(self.norm(u, "mtp.0.attn_norm.weight"), at, "mtp.0.")
            out = self.layer(x[-1:], at[-1:], lambda _, seen=(keys, near[None]): seen, "mtp.0.")
            z = (self.norm(self.collapsed(out, "mtp.0."), "mtp.0.norm.weight") @ self.w["head.weight"].T)[0]
            token = pick(k, z)
            alive *= float(z.softmax(0).max())
            drafted.append(token)
            survival.append(alive)
            logits.append(z)
            rows, known = torch.cat([rows, out]), [*known, token]
        return drafted, torch.tensor(survival, dtype=torch.float64), torch.stack(logits)

    def module_input(self, rows: Tensor, tokens: list[int]) -> Tensor:
        """Input streams [n, hc, H]."""
        e = self.norm(self.w["embed.weight"][torch.tensor(tokens)], "mtp.0.enorm.weight")
        h = self.norm(rows, "mtp.0.hnorm.weight") @ self.w["mtp.0.h_proj.weight"].T
        return (e @ self.w["mtp.0.e_proj.weight"].T).unsqueeze(1) + h
