"""What training does when, as a function of progress: the share of the time budget that has passed.

Everything hangs on progress, nothing on step counts, so that a run of any length on any device finishes its
decay, its selection stage and its rounding before the deadline.
"""

from dataclasses import dataclass

PEAK_RATE = 3e-3
FINAL_RATE_SHARE = 0.02
WARM_UP = 0.02
DECAY_FROM = 0.62
# The indexer first learns from dense attention, then works; it gets a fifth of the run at work.
INDEX_FROM = 0.50
SELECT_FROM = 0.80
QUANTISE_FROM = 0.85
# Share of rows that are chat tasks: some early, so that copying is learned while the rate is high, then most
# of the decay. The corpus is short (53 M tokens) and the tasks have no end.
CHAT_EARLY = (0.08, 0.25)
CHAT_LATE = (0.66, 0.6875)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one step."""

    rate: float
    stage: str
    quantise: bool
    chat_share: float
    bias_rate: float


def plan(progress: float) -> Plan:
    """Settings at `progress` in [0, 1]."""
    warm = min(progress / WARM_UP, 1.0)
    left = min((1.0 - progress) / (1.0 - DECAY_FROM), 1.0)
    share = warm * (FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * max(left, 0.0))
    stage = "select" if progress >= SELECT_FROM else "index" if progress >= INDEX_FROM else "dense"
    chat = 0.0
    for start, amount in (CHAT_EARLY, CHAT_LATE):
        if progress >= start:
            chat = amount
    # Load balancing must be quiet at the end: a bias that still moves changes which experts are chosen.
    bias_rate = 2e-3 * max(left, 0.0)
    return Plan(PEAK_RATE * share, stage, progress >= QUANTISE_FROM, chat, bias_rate)
