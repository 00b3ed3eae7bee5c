"""The sampling rules once more, in plain Python on lists: the reference for the batched code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from engine.messages import Sampling


def processed(
    logits: Sequence[float],
    s: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
) -> list[float]:
    """Logits after bias, penalties and minimum length."""
    out = list(logits)
    for token, bias in s.logit_bias:
        out[token] += bias
    counts = Counter(output)
    for token in range(len(out)):
        if token in counts or token in prompt:
            value = out[token]
            out[token] = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if token in counts:
            out[token] -= s.frequency_penalty * counts[token] + s.presence_penalty
    if len(output) < s.min_new_tokens:
        for token in (*stop_ids, *s.stop_token_ids):
            out[token] = -math.inf
    return out


def distribution(logits: Sequence[float], s: Sampling) -> list[float]:
    """Exact probabilities after temperature, top-k, top-p, min-p; of equals the lowest id is first."""
    if s.temperature == 0:
        best = max(range(len(logits)), key=lambda token: logits[token])
        return [float(token == best) for token in range(len(logits))]
    peak = max(logits)
    weights = [math.exp((value - peak) / s.temperature) for value in logits]
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if s.top_k:
        ranked = ranked[: s.top_k]
    total, below, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if kept and ((s.top_p < 1 and below >= s.top_p * total) or weights[token] < s.min_p):
            break
        kept.append(token)
        below += weights[token]
    share = sum(weights[token] for token in kept)
    return [weights[token] / share if token in kept else 0.0 for token in range(len(weights))]
