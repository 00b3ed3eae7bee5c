"""What `bench offline --speculative both` tells of its pairs: ratios, costs, acceptance, calibration."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api.handle import Engine
from engine.config import Settings
from engine.errors import EngineError
from engine.messages import StepDone
from engine.model.config import ModelConfig

BINS = 15
"""Of equal width, for the calibration error."""

LEAST_ODDS = 1e-6
"""Confidences closer to 0 or 1 count as this far from it: their logits are lost in float32."""

Table = NDArray[np.float64]
"""[rounds, gamma]"""


class NothingDrafted(EngineError):
    """The path that the benchmark is about did not run."""


@dataclass(frozen=True)
class Side:
    """One engine, and the results of its steps."""

    settings: Settings
    engine: Engine
    steps: list[StepDone]


@dataclass
class Pass:
    """What one engine made of one share.

    by_kind  seconds, of requests that ran alone
    drafts   rounds, drafted tokens verified, accepted
    """

    tokens: list[list[int]]
    seconds: float
    by_kind: dict[str, float]
    drafts: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Tokens given out."""
        return sum(map(len, self.tokens))


def figures(told: Sequence[Sequence[Pass]], sides: Sequence[Side], concurrency: int) -> dict[str, Any]:
    """From all pairs. raises NothingDrafted

    told   passes of each pair, one a side
    sides  without drafts, with drafts, and where there are three, with drafts in mode static
    """
    drafts = sum((passes[1].drafts for passes in told), np.zeros(3, np.int64))
    steps = sides[1].steps
    drafting = [done for done in steps if done.survival]
    if not drafting:
        raise NothingDrafted(f"no step of {len(steps)} drafted anything")
    ratios = [passes[0].seconds / passes[1].seconds for passes in told]
    low, middle, high = statistics.quantiles(ratios, n=4)
    count = sum(passes[0].count for passes in told)
    out = {
        "concurrency": concurrency,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "tokens": count,
        "plain_tokens_per_s": count / sum(passes[0].seconds for passes in told),
        "drafted_tokens_per_s": count / sum(passes[1].seconds for passes in told),
        **_against_static(told),
        "drafting_share": len(drafting) / len(steps),
        "draft_tokens": int(drafts[1]),
        "accept_rate": float(drafts[2] / max(drafts[1], 1)),
        "accept_length": 1 + float(drafts[2] / max(drafts[0], 1)),
        **{f"ratio_{kind}": _ratio_of(told, kind) for kind in told[0][0].by_kind},
        **costs(sides),
    }
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in out.items()}
    return rounded | {"calibration": calibration(sides[-1])}


def _against_static(told: Sequence[Sequence[Pass]]) -> dict[str, float]:
    """Plain decoding's time over that of mode static, and static's over that of scheduled drafts."""
    if len(told[0]) < 3:
        return {}
    return {
        "static_ratio": statistics.median(plain.seconds / static.seconds for plain, _, static in told),
        "compact_over_static": statistics.median(
            static.seconds / drafted.seconds for _, drafted, static in told
        ),
    }


def _ratio_of(told: Sequence[Sequence[Pass]], kind: str) -> float:
    return statistics.median(passes[0].by_kind[kind] / passes[1].by_kind[kind] for passes in told)


def costs(sides: Sequence[Side]) -> dict[str, float]:
    """What a full verification and a draft of one request take, over a plain step of one request."""
    plain = [done.seconds for done in sides[0].steps if len(done.counts) == 1 and done.counts[0] == 1]
    alone = [done for done in sides[1].steps if len(done.counts) == 1 and done.survival]
    most = max((done.verified[0] for done in alone), default=0)
    full = [done for done in alone if done.verified[0] == most]
    if not plain or not full:
        return {}
    step_s = statistics.median(plain)
    return {
        "plain_step_ms": step_s * 1e3,
        "verify_rows": most,
        "verify_over_plain": statistics.median(done.phases[1] for done in full) / step_s,
        "draft_over_plain": statistics.median(done.phases[0] for done in full) / step_s,
        "accept_over_plain": statistics.median(done.phases[2] for done in full) / step_s,
    }


def calibration(side: Side) -> dict[str, Any]:
    """How well survival foretold acceptance, by position, over rounds that verified their whole draft.

    ece          expected calibration error of the served survival; its label: so many drafts were accepted
    ece_raw      the same of the confidence head without its temperatures
    survival, accepted  means by position

    In mode static every round counts but those at the end of a request. Where drafts are scheduled, whole
    ones are those that promised most, and the figures are of these alone (`all_rounds` is false).
    """
    dspark = ModelConfig.from_json(side.settings.model_path).dspark
    survival, labels = full_rounds(side.steps)
    if dspark is None or not len(labels):
        return {}
    gamma = survival.shape[1]
    temperatures = np.array([*dspark.sts_temperatures, *[1.0] * gamma][:gamma])
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    own = np.clip(survival / np.maximum(before, LEAST_ODDS), LEAST_ODDS, 1 - LEAST_ODDS)
    raw = np.cumprod(1 / (1 + np.exp(-temperatures * np.log(own / (1 - own)))), axis=1)
    return {
        "all_rounds": side.settings.speculative_verify_mode == "static",
        "rounds": len(labels),
        "ece": [round(error, 4) for error in errors(survival, labels)],
        "ece_raw": [round(error, 4) for error in errors(raw, labels)],
        "survival": [round(mean, 4) for mean in survival.mean(axis=0).tolist()],
        "accepted": [round(mean, 4) for mean in labels.mean(axis=0).tolist()],
    }


def full_rounds(steps: Sequence[StepDone]) -> tuple[Table, Table]:
    """(survival, 1 where so many drafts were accepted, else 0) of rounds that verified their whole draft."""
    told: list[Table] = []
    kept: list[Table] = []
    for done in (done for done in steps if done.survival):
        groups = len(done.verified)
        survival = np.frombuffer(done.survival, np.float32).reshape(groups, -1).astype(np.float64)
        gamma = survival.shape[1]
        whole = np.frombuffer(done.verified, np.uint8) == gamma + 1
        accepted = np.frombuffer(done.counts, np.uint8)[whole].astype(np.int64) - 1
        told.append(survival[whole])
        kept.append((accepted[:, None] > np.arange(gamma)).astype(np.float64))
    if not told:
        return np.zeros((0, 0)), np.zeros((0, 0))
    return np.concatenate(told), np.concatenate(kept)


def errors(survival: Table, labels: Table) -> list[float]:
    """Expected calibration error of each position: the mean distance of promise and share, by bins."""
    found = []
    for promised, kept in zip(survival.T, labels.T, strict=True):
        at = np.minimum((promised * BINS).astype(np.int64), BINS - 1)
        gaps = np.abs(np.bincount(at, promised, minlength=BINS) - np.bincount(at, kept, minlength=BINS))
        found.append(float(gaps.sum() / promised.size))
    return found
