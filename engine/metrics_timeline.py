"""What the HTTP side knows of one completion, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Timeline:
    """Seconds of one completion on the loop's clock. Kept by the HTTP side, read by `Metrics`.

    prompt_tokens  0 for all but the first completion of a prompt, which counts it for all
    rank           where it runs
    """

    streaming: bool
    prompt_tokens: int
    began_s: float
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0
    rank: int = 0
