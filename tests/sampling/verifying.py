"""The rules of verification once more, in plain Python on one group; and a pair of toy models to verify."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import Sampling
from engine.runner.acceptance import Acceptance
from engine.runner.acceptance_layout import VerifyRows
from engine.runner.randomness import Purpose, request_keys, uniforms
from tests.sampling.naive import distribution, processed


@dataclass(frozen=True)
class Group:
    """One request's rows. `proposals` are draft logits by row, or None: a draft is what had to come."""

    sampling: Sampling
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: list[list[float]]
    drafts: list[int]
    proposals: list[list[float]] | None


class Close(Exception):
    """A number lies so close to a boundary that float32 may decide otherwise."""


def number(group: Group, ahead: int, purpose: Purpose) -> float:
    """The number of one token of the group."""
    keys = request_keys(torch.tensor([group.sampling.seed]), torch.tensor([0]))
    position = len(group.prompt) + len(group.output) + ahead
    return float(uniforms(keys, torch.tensor([position]), purpose)[0])


def emitted(group: Group, stop_ids: Sequence[int]) -> list[int]:
    """Tokens that the group emits; none where nothing is allowed at the last of them."""
    out: list[int] = []
    for row, logits in enumerate(group.logits):
        seen = (*group.output, *out)
        edited = processed(logits, group.sampling, group.prompt, seen, stop_ids)
        if max(edited) == -math.inf:
            return []
        p = distribution(edited, group.sampling)
        if row == len(group.logits) - 1:
            return [*out, bonus(group, p, row)]
        draft = group.drafts[row]
        q = proposed(group, row, len(p))
        inside = 0 <= draft < len(p) and q[draft] > 0
        u = number(group, row, Purpose.ACCEPT)
        if inside and group.sampling.temperature > 0 and abs(u * q[draft] - p[draft]) < 1e-4:
            raise Close
        if inside and u * q[draft] < p[draft]:
            out.append(draft)
            continue
        residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)] if inside else p
        if abs(sum(residual) - 1e-8) < 1e-5:
            raise Close
        return [*out, pick(residual, number(group, row, Purpose.RESIDUAL))]
    return out


def proposed(group: Group, row: int, vocab_size: int) -> list[float]:
    """What the draft of a row was drawn from."""
    if group.proposals is None or group.sampling.temperature == 0:
        return [float(token == group.drafts[row]) for token in range(vocab_size)]
    return distribution(group.proposals[row], Sampling(1, temperature=group.sampling.temperature))


def bonus(group: Group, p: Sequence[float], row: int) -> int:
    """The draw of plain decoding: by rank where the distribution is cut, else by token id."""
    s, u = group.sampling, number(group, row, Purpose.SAMPLE)
    if s.top_k == 0 and s.top_p == 1 and s.min_p == 0:
        return pick(p, u)
    ranked = sorted(range(len(p)), key=lambda token: (-p[token], token))
    return ranked[pick([p[token] for token in ranked], u)]


def pick(weights: Sequence[float], u: float) -> int:
    """First index whose cumulative share exceeds u."""
    total, below = sum(weights), 0.0
    for index, weight in enumerate(weights):
        if weight > 0 and abs(below + weight - u * total) < 1e-5 * total:
            raise Close
        below += weight
        if below > u * total:
            return index
    raise Close


@dataclass(frozen=True)
class Toy:
    """A target and a draft of first order over V tokens: float32 [V, V], logits after each token."""

    target: Tensor
    draft: Tensor
    gamma: int
    one_hot: bool = False

    def chains(
        self,
        acceptance: Acceptance,
        slots: Sequence[int],
        positions: Sequence[int],
        length: int,
        cuts: torch.Generator | None,
    ) -> tuple[Tensor, Tensor]:
        """`length` tokens of each chain after token 0, in as many rounds as it takes.

        Returns tokens int64 [chains, length], and whether the first draft of each was accepted. With `cuts`
        each round of each chain verifies a random number of rows.
        """
        chains, gamma = len(slots), self.gamma
        out = torch.zeros(chains, length + gamma + 1, dtype=torch.int64)
        done, anchors = torch.zeros(chains, dtype=torch.int64), torch.zeros(chains, dtype=torch.int64)
        first: Tensor | None = None
        while bool((done < length).any()):
            places = tuple((torch.tensor(positions) + done).tolist())
            choose = acceptance.choose(tuple(slots), places)
            ids, z = [anchors], []
            for k in range(gamma):
                z.append(self.draft[ids[-1]])
                ids.append(z[-1].argmax(-1) if self.one_hot else choose(k, z[-1]))
            block = torch.stack(ids, 1)
            lens = torch.full((chains,), gamma + 1)
            if cuts is not None:
                lens = torch.randint(1, gamma + 2, (chains,), generator=cuts)
            lens = torch.where(done < length, lens, 0)
            verified = torch.arange(gamma + 1) < lens[:, None]
            logits = self.target[block[verified]]
            drafts = None if self.one_hot else torch.stack(z, 1)
            rows = VerifyRows(tuple(slots), places, np.asarray(lens), block[:, 1:], drafts)
            found = acceptance.accept(logits, rows)
            assert bool(found.valid.all())
            first = found.counts > 1 if first is None else first
            columns = torch.arange(gamma + 1)
            for column in columns.tolist():
                rows_left = torch.nonzero(column < found.counts)[:, 0]
                out[rows_left, done[rows_left] + column] = found.tokens[rows_left, column]
            done = done + found.counts
            anchors = torch.where(done > 0, out.gather(1, (done - 1).clamp_min(0)[:, None])[:, 0], 0)
        assert first is not None
        return out[:, :length], first

    def joint(self, sampling: Sampling, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
        """Exact probability of each text of so many tokens, by the target alone."""
        texts: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for text, share in texts.items():
                logits = self.target[text[-1] if text else 0].tolist()
                p = distribution(processed(logits, sampling, prompt, text, (1,)), sampling)
                longer |= {(*text, token): share * p[token] for token in range(len(p))}
            texts = longer
        return texts
