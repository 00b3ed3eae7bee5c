"""The server's metrics as a client reads them: values by series, which of them only grow, and sums."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(slots=True)
class Figures:
    """One scrape.

    values   by name without the prefix, with the labels as the server wrote them
    growing  names of counters and of the parts of histograms
    """

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series of a name that have these labels; 0 where there is none."""
        series = self.values.get(name, {})
        return sum(value for key, value in series.items() if has(key, labels))

    def ranks(self) -> list[str]:
        """Labels of the ranks, in order."""
        found = {labels_of(key).get("dp_rank", "") for key in self.values.get("num_running_reqs", {})}
        return sorted(found - {""})

    def by_status(self, endpoint: str) -> dict[str, float]:
        """HTTP answers of a path, by status."""
        found: dict[str, float] = {}
        for key, value in self.values.get("http_responses_total", {}).items():
            labels = labels_of(key)
            if labels.get("endpoint") == endpoint:
                found[labels["status_code"]] = found.get(labels["status_code"], 0.0) + value
        return found


def labels_of(key: str) -> dict[str, str]:
    """Labels of a series."""
    return dict(LABEL.findall(key))


def has(key: str, labels: dict[str, str]) -> bool:
    """Whether a series has these labels."""
    return all(f'{name}="{value}"' in key for name, value in labels.items())


def read(text: str, prefix: str) -> Figures:
    """The text format of a scrape. Series with another prefix are left out."""
    figures = Figures()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            name = name.removeprefix(prefix)
            if kind == "counter":
                figures.growing |= {name, name + "_total"}
            elif kind == "histogram":
                figures.growing |= {name + end for end in ("_bucket", "_sum", "_count")}
        elif (found := LINE.match(line)) and found[1].startswith(prefix):
            series = figures.values.setdefault(found[1].removeprefix(prefix), {})
            series[found[2] or ""] = float(found[3])
    return figures


def shrunk(before: Figures, now: Figures) -> list[str]:
    """What must only grow, but is smaller than before, or gone."""
    found = []
    for name in sorted(before.growing & before.values.keys()):
        for key, value in before.values[name].items():
            current = now.values.get(name, {}).get(key)
            if current is None:
                found.append(f"{name}{key} was {value:g} and is gone")
            elif current < value:
                found.append(f"{name}{key} fell from {value:g} to {current:g}")
    return found


def drained(figures: Figures) -> list[str]:
    """What the ranks still hold; empty where nothing runs, waits or keeps a page."""
    left = []
    for rank in figures.ranks():
        free = figures.total("kv_available_tokens", dp_rank=rank)
        used = figures.total("kv_used_tokens", dp_rank=rank)
        total = figures.total("max_total_num_tokens", dp_rank=rank)
        for name in ("num_running_reqs", "num_queue_reqs", "kv_used_tokens"):
            value = figures.total(name, dp_rank=rank)
            if value:
                left.append(f"rank {rank}: {name} is {value:g}")
        if free + used != total:
            left.append(f"rank {rank}: {free:g} free + {used:g} held tokens of cache are not {total:g}")
    left += [
        f"{name} is {figures.total(name):g}"
        for name in ("num_grammar_queue_reqs", "grammar_inflight")
        if figures.total(name)
    ]
    return left
