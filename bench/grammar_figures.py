"""Figures of `bench grammar`: what became of each answer, and what the parts took."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api.gate import Wish
from bench.grammar_cases import Case
from engine.errors import EngineError
from engine.grammar.pipeline_counters import PipelineCounters
from engine.grammar.service import GrammarService
from engine.messages import STOP_EOS


class NothingMasked(EngineError):
    """The path that the benchmark is about did not run."""


class NotCompiledOnce(EngineError):
    """The cache or the sharing of compiles did not work as it should."""


class UnequalLengths(EngineError):
    """Two passes that are compared have answers of other lengths than were asked for."""


class Invalid(EngineError):
    """An answer that a grammar constrained doesn't obey its schema."""


@dataclass(frozen=True)
class Asked:
    """One request: its schema, the prompt that asks for such a value, and its grammar."""

    case: Case
    prompt: bytes
    wish: Wish


@dataclass
class Answer:
    """What came of one request. `drafts`: rounds, drafted tokens verified, accepted."""

    text: str = ""
    tokens: int = 0
    finish: int = 0
    wait_s: float = 0.0
    drafts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))


@dataclass
class Pass:
    """All requests once."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        """Given out."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def round_s(self) -> float:
        """Seconds by round of a request: what remains of a ratio where texts take drafts unequally.

        Every token but the accepted drafts stands for one: the first of an answer, too, and those that no
        draft was verified for.
        """
        accepted = sum(int(answer.drafts[2]) for answer in self.answers)
        return self.seconds / (self.tokens - accepted)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def fault_of(schema: dict[str, Any], text: str) -> str:
    """What is wrong with an answer; empty for nothing."""
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"is not JSON: {error}"
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    fault = next(validator.iter_errors(value), None)
    if fault is not None:
        return f"breaks its schema: {fault.message}"
    canonical = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    again = json.loads(canonical)
    same = again == value and json.dumps(again, ensure_ascii=False, separators=(",", ":")) == canonical
    return "" if same else "is another value when it is written and read again"


def validity(asked: Sequence[Asked], answers: Sequence[Answer]) -> dict[str, Any]:
    """How many answers obey. raises Invalid for one that ended by itself and doesn't."""
    faults = [fault_of(asked[i % len(asked)].case.schema, answer.text) for i, answer in enumerate(answers)]
    whole = [answer.finish == STOP_EOS for answer in answers]
    for i, (fault, ended) in enumerate(zip(faults, whole, strict=True)):
        if fault and ended:
            raise Invalid(f"schema {i % len(asked)}: {answers[i].text[:200]!r} {fault}")
    valid = [ended and not fault for fault, ended in zip(faults, whole, strict=True)]
    return {
        "answers": len(answers),
        "valid_fraction": sum(valid) / len(valid),
        "accepted_but_invalid": 0,
        "distinct_texts": len({answer.text for answer in answers}),
    }


def compiles(service: GrammarService, asked: Sequence[Asked]) -> dict[str, Any]:
    """raises NotCompiledOnce where a key has another number of compiles than one."""
    distinct = len({one.wish.key.digest for one in asked})
    counts = service.cores[-1].counts
    made = int(counts["compile"])
    if made != distinct:
        raise NotCompiledOnce(f"{distinct} keys were compiled {made} times")
    return {"distinct_keys": distinct, "compiles": made, "resolutions": int(counts["wanted"])}


def check_lengths(told: Sequence[Pass], lengths: Sequence[int]) -> None:
    """raises UnequalLengths"""
    for one in told:
        found = [answer.tokens for answer in one.answers]
        if found != [*lengths]:
            raise UnequalLengths(f"answers of {found} tokens stand against lengths of {[*lengths]}")


def costs(
    told: Sequence[tuple[Pass, Pass]], service: GrammarService, checked: Sequence[Pass], gate_s: float
) -> dict[str, Any]:
    """Throughputs and the time of each phase."""
    ratios = [bound.speed / free.speed for bound, free in told]
    low, middle, high = statistics.quantiles(ratios, n=4)
    answers = [answer for bound, _ in told for answer in bound.answers]
    drafts = np.sum([answer.drafts for answer in answers], axis=0)
    freely = np.sum([answer.drafts for _, free in told for answer in free.answers], axis=0)
    phases = service.counters.phases
    return {
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "tokens": sum(bound.tokens for bound, _ in told),
        "constrained_tokens_per_s": statistics.median(bound.speed for bound, _ in told),
        "free_tokens_per_s": statistics.median(free.speed for _, free in told),
        "draft_tokens": int(drafts[1]),
        "accept_rate": float(drafts[2] / max(drafts[1], 1)),
        "free_accept_rate": float(freely[2] / max(freely[1], 1)),
        "round_ratio": statistics.median(free.round_s / bound.round_s for bound, free in told),
        "gate_ms": 1e3 * gate_s / len(checked[0].answers),
        "first_wait_ms": 1e3 * statistics.median(answer.wait_s for answer in checked[0].answers),
        "cached_wait_ms": 1e3 * statistics.median(answer.wait_s for answer in answers),
        **{f"{name}_ms": 1e3 * one.total_s / one.count for name, one in phases.items() if one.count},
    }


def masks(counters: PipelineCounters) -> dict[str, Any]:
    """Rows of all steps by what their mask means, and the mean of each phase. raises NothingMasked."""
    if not counters.rows["masked"]:
        raise NothingMasked("no row of any step was masked")
    return {
        "rows_masked": counters.rows["masked"],
        "steps_with_masks": sum(counters.batches.values()),
        **{f"step_{name}_ms": 1e3 * counters.seconds[name] / n for name, n in counters.times.items() if n},
    }
