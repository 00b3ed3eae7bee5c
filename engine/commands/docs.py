"""`python -m engine docs`: writes the pages that are made from the code, or compares them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import NANO
from engine.config_sources import FIELDS, KINDS, PREFIX, flags_of, kind_of

DOCS = Path(__file__).parents[2] / "docs" / "operations"
MADE = "<!-- Made by `python -m engine docs`; edit the code instead. -->\n"

SECTIONS: dict[str, Callable[[str, tuple[str, ...]], bool]] = {
    "Names of vLLM (with `--enable-vllm-metrics`)": lambda name, labels: name.startswith("vllm:"),
    "The exchange between two ranks (with `--dp-exchange native`)": lambda name, labels: "dp2_sync" in name,
    "Speculation, by rank": lambda name, labels: "dp_rank" in labels and ":spec_" in name,
    "Grammars": lambda name, labels: "grammar" in name or "matcher" in name,
    "Ranks": lambda name, labels: "dp_rank" in labels,
    "HTTP": lambda name, labels: ":http_" in name,
    "Routing": lambda name, labels: ":dp_" in name,
    "Requests and the process that serves them": lambda name, labels: True,
}
"""Heading -> whether a series belongs there; the first to say yes has it. The last one comes first."""

UNITS = (
    ("per_second", "a second"),
    ("time_to_first_token", "seconds"),
    ("seconds", "seconds"),
    ("_gb", "GB"),
    ("bytes", "bytes"),
    ("usage", "share, 0 to 1"),
    ("utilization", "share, 0 to 1"),
    ("rate", "share, 0 to 1"),
    ("new_token_ratio", "share, 0 to 1"),
    ("imbalance_ratio", "1 or more"),
    ("throughput", "tokens a second"),
    ("tokens", "tokens"),
    ("accept_length", "tokens"),
    ("seq_lens", "tokens"),
    ("context_len", "tokens"),
    ("page_size", "tokens"),
    ("pages", "pages"),
    ("reqs", "requests"),
    ("requests", "requests"),
)
"""Part of a name -> unit; the first that fits. Else a number."""

COMMON = ("model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank")
SHOWN_VALUES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `docs`."""
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a page differs")


def run(args: argparse.Namespace) -> int:
    """Writes or compares docs/operations/flags.md and metrics.md."""
    pages = {"flags.md": flags_page(), "metrics.md": metrics_page()}
    stale = [name for name, text in pages.items() if not _same(DOCS / name, text)]
    if args.check:
        for name in stale:
            print(f"docs/operations/{name} isn't what the code says; `make docs` writes it", file=sys.stderr)
        return 1 if stale else 0
    for name in stale:
        (DOCS / name).write_text(pages[name])
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


def flags_page() -> str:
    """Every setting: flags, variable, key of a file, type, default, meaning."""
    lines = [
        MADE,
        "# Settings",
        "",
        "A flag wins over the variable of the environment, that over the file of `--config`, that over the",
        "default. The key in a file is the field's name. `--no-FLAG` turns a switch off.",
        "",
        "| flags | variable | key | values | default | meaning |",
        "|---|---|---|---|---|---|",
        "| `--config FILE` | | | a path | none | TOML file of settings |",
        "| `--print-config` | | | | off | prints every setting and what set it, and ends |",
    ]
    for name, item in FIELDS.items():
        flags = " ".join(f"`{flag}`" for flag in flags_of(name))
        choices = " ".join(f"`{choice or chr(34) * 2}`" for choice in item.metadata["choices"])
        shown = "engine/assets/nano" if item.default == str(NANO) else item.default
        default = f"`{str(shown).lower() if isinstance(shown, bool) else shown}`" if shown != "" else "empty"
        values = choices or KINDS[kind_of(name)]
        say = item.metadata["say"].replace("|", "\\|")
        lines.append(f"| {flags} | `{PREFIX}{name.upper()}` | `{name}` | {values} | {default} | {say} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every series of a registry that has all: name, type, own labels with their values, unit, meaning."""
    rows: dict[str, list[str]] = {heading: [] for heading in SECTIONS}
    for name, kind, labels, say in exported():
        heading = next(one for one, belongs in SECTIONS.items() if belongs(name, tuple(labels)))
        own = ", ".join(
            f"`{label}`" + (f" ({', '.join(values)})" if values else "")
            for label, values in labels.items()
            if label not in COMMON
        )
        rows[heading].append(f"| `{name}` | {kind} | {own} | {unit_of(name)} | {say} |")
    lines = [
        MADE,
        "# Metrics",
        "",
        "`GET /metrics` has the text format of Prometheus. The prefix `sglang:` is a setting",
        "(`--metrics-prefix`). Series of a rank carry `model_name`, `engine_type`, `dp_rank`, `tp_rank`,",
        "`pp_rank` and `moe_ep_rank`, most others `model_name`; the tables name the further labels with the",
        "values that exist from the start. No label carries a client's text. Counters go on over a rank's",
        "end. What a rank publishes is at most `--snapshot-s` old.",
    ]
    for heading, found in reversed(rows.items()):
        lines += [
            "",
            f"## {heading}",
            "",
            "| name | type | labels | unit | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += found
    return "\n".join(lines) + "\n"


def unit_of(name: str) -> str:
    """The unit of a series' value; for a histogram that of what is observed."""
    return next((unit for part, unit in UNITS if part in name), "number")


def exported() -> list[tuple[str, str, dict[str, list[str]], str]]:
    """(name as it is scraped, type, label -> its bounded values, meaning) of all series of a server."""
    from api.app import ENDPOINTS
    from engine.metrics import Metrics

    metrics = Metrics("sglang:", "nano", 1, 1, ENDPOINTS, native=True, vllm=True)
    found = []
    for family in metrics.registry.collect():
        labels: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                values = labels.setdefault(label, [])
                if label != "le" and value not in values:
                    values.append(value)
        labels.pop("le", None)
        for label, values in labels.items():
            if label in ("dp_rank", "rank", "engine", *COMMON) or len(values) > SHOWN_VALUES:
                values.clear()
        name = family.name + ("_total" if family.type == "counter" else "")
        found.append((name, family.type, labels, family.documentation))
    return found
