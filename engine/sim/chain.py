"""What the simulated model computes: a number a position, and tokens as a function of that number.

The number of a position is made of the number before it, its own token, the token that leaves the window, and
the token at half its position. A page that was freed too early, shared by mistake, filled in a wrong order or
read at a stale length thus shows as a wrong text, near or far behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.messages import LENGTH, STOP_EOS, STOP_TOKEN, Sampling

WINDOW = 128
EOS = 1
FIRST_TOKEN, TOKENS = 128, 192
"""Sampled tokens: single bytes, parts of characters and words of the shipped tokenizer, and EOS."""

START = 0x9E3779B97F4A7C15
FAILS = -2
"""In place of a sampled token: the row's sampling fails."""

_MASK = (1 << 64) - 1
_FACTOR, _TOKEN, _LEAVING, _FAR, _ADD = 6364136223846793005, 1442695040888963407, 97, 131, 11
_LONGEST = 1 << 14


@dataclass(frozen=True, slots=True)
class Rules:
    """How tokens are sampled.

    eos      one in so many tokens is EOS
    failing  one in so many sampled rows fails; 0: none
    """

    eos: int = 40
    failing: int = 0


def following(before: int, token: int, leaving: int, far: int) -> int:
    """The number of a position; `leaving` and `far` are -1 where nothing is there."""
    return (before * _FACTOR + token * _TOKEN + leaving * _LEAVING + far * _FAR + _ADD) & _MASK


def followings(before: int, tokens: Sequence[int], leaving: Sequence[int], far: Sequence[int]) -> list[int]:
    """The numbers of several positions in a row."""
    columns = [np.array(column, np.int64).astype(np.uint64) for column in (tokens, leaving, far)]
    added = columns[0] * np.uint64(_TOKEN) + columns[1] * np.uint64(_LEAVING) + columns[2] * np.uint64(_FAR)
    # x[n] = f * x[n-1] + c[n], solved: x[n] = f^n * (x[0] + sum of f^-k * c[k]), all modulo 2^64.
    powers, inverses = _POWERS[1 : len(tokens) + 1], _INVERSES[1 : len(tokens) + 1]
    sums = np.cumsum((added + np.uint64(_ADD)) * inverses, dtype=np.uint64) + np.uint64(before)
    numbers: list[int] = (sums * powers).tolist()
    return numbers


def sampled(number: int, seed: int, child: int, rules: Rules) -> int:
    """The token after a position with this number, or FAILS."""
    drawn = (((number ^ (seed * 2654435761 + child * 40503)) & _MASK) * 0x2545F4914F6CDD1D & _MASK) >> 20
    if rules.failing and drawn % rules.failing == 1:
        return FAILS
    if drawn % rules.eos == 0:
        return EOS
    return FIRST_TOKEN + (drawn >> 12) % TOKENS


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request generates alone: tokens, and the finish code; FAILS where its sampling fails after
    them.
    """

    tokens: tuple[int, ...]
    finish: int


def expected(prompt: Sequence[int], how: Sampling, child: int, context: int, rules: Rules) -> Expected:
    """The oracle. `context` is the longest prompt and output together."""
    tokens = list(prompt)
    most = min(len(prompt) + how.max_new_tokens, context)
    leaving = [tokens[at - WINDOW + 1] if at >= WINDOW - 1 else -1 for at in range(len(tokens))]
    far = [tokens[at // 2] if at else -1 for at in range(len(tokens))]
    number = followings(START, tokens, leaving, far)[-1]
    while True:
        token = sampled(number, how.seed, child, rules)
        if token == FAILS:
            return Expected(tuple(tokens[len(prompt) :]), FAILS)
        tokens.append(token)
        may_stop = len(tokens) - len(prompt) > how.min_new_tokens
        if may_stop and token == EOS and not how.ignore_eos:
            return Expected(tuple(tokens[len(prompt) :]), STOP_EOS)
        if may_stop and token in how.stop_token_ids:
            return Expected(tuple(tokens[len(prompt) :]), STOP_TOKEN)
        if len(tokens) >= most:
            return Expected(tuple(tokens[len(prompt) :]), LENGTH)
        at = len(tokens) - 1
        number = following(
            number, token, tokens[at - WINDOW + 1] if at >= WINDOW - 1 else -1, tokens[at // 2]
        )


def prompt_of(seed: int, tokens: int) -> list[int]:
    """A prompt of so many tokens, a function of the seed."""
    draw = np.arange(1, tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & _MASK)
    mixed = (draw ^ (draw >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    prompt: list[int] = (FIRST_TOKEN + (mixed >> np.uint64(40)) % np.uint64(TOKENS)).tolist()
    return prompt


def _powers(factor: int) -> NDArray[np.uint64]:
    found = [1]
    for _ in range(_LONGEST):
        found.append(found[-1] * factor & _MASK)
    return np.array(found, np.uint64)


_POWERS, _INVERSES = _powers(_FACTOR), _powers(pow(_FACTOR, -1, 1 << 64))
