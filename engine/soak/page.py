"""The HTML report: one file that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from engine.soak.plots import plot

STYLE = """
body { font: 14px/1.4 sans-serif; max-width: 60rem; margin: 1rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left; }
td { vertical-align: top; overflow-wrap: anywhere; } figure { margin: 1rem 0; } svg { width: 100%; }
svg text { font-size: 11px; fill: #555; } .grid { stroke: #ddd; } .bad { color: #b00; } .good { color: #070; }
"""

OF_SAMPLES = (
    ("Answers, whole", "ms", ("latency_ms_p50", "latency_ms_p99")),
    ("First event of streams", "ms", ("first_event_ms_p50",)),
    ("Health answers", "ms", ("health_ms_p99",)),
    ("Accepted share of verified drafts", "share", ("acceptance",)),
    ("Requests so far", "requests", ("requests",)),
)
OF_PROCESSES = (
    ("Resident memory", "MiB", "rss_mib"),
    ("Memory without pages of files", "MiB", "own_mib"),
    ("Descriptors", "open", "descriptors"),
    ("Threads", "running", "threads"),
)
HIDDEN = ("samples", "violation_list")


def page(report: dict[str, Any]) -> str:
    """The whole page for a JSON report."""
    told = report["figures"]
    samples = told["samples"]
    plots = [plot(title, unit, lines_of(samples, keys)) for title, unit, keys in OF_SAMPLES]
    names = sorted({name for row in samples for name in row["processes"]})
    for title, unit, key in OF_PROCESSES:
        lines = {
            name: [
                (row["at_s"] / 60, row["processes"][name][key]) for row in samples if name in row["processes"]
            ]
            for name in names
        }
        plots.append(plot(title, unit, lines))
    count = told["violations"]
    verdict = f'<p class="{"bad" if count else "good"}">{count} violations</p>'
    head = {"command": report["command"], "commit": report["commit"], "machine": report["machine"]}
    shown = {name: value for name, value in told.items() if name not in HIDDEN}
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>soak</title><style>{STYLE}</style>'
        f"<h1>Soak, {told['minutes']} minutes</h1>{verdict}{violations(told['violation_list'])}"
        f"<h2>Course</h2><p>Minutes of traffic from left to right.</p>{''.join(plots)}"
        f"<h2>Figures</h2>{table(shown)}<h2>Run</h2>{table(head)}</html>\n"
    )


def lines_of(samples: list[dict[str, Any]], keys: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """(minutes, value) of each key; samples without a value are left out."""
    return {key: [(row["at_s"] / 60, row[key]) for row in samples if row[key] is not None] for key in keys}


def violations(found: list[dict[str, Any]]) -> str:
    """A table with time and evidence; empty for none."""
    if not found:
        return ""
    rows = "".join(
        f"<tr><td>{one['at_s']}</td><td>{escape(one['wall'])}</td><td>{escape(one['what'])}</td>"
        f"<td>{escape(one['evidence'])}</td></tr>"
        for one in found
    )
    return f"<table><tr><th>s</th><th>time</th><th>what</th><th>evidence</th></tr>{rows}</table>"


def table(values: dict[str, Any]) -> str:
    """Names and values; a mapping becomes a list."""
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {one}" for key, one in value.items())
        rows.append(f"<tr><th>{escape(str(name))}</th><td>{escape(str(value))}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
