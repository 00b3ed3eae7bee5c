"""Pages made from the code, dashboards and rules name only what exists, and no link is dead."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from engine.commands.docs import DOCS, exported, run
from engine.config_sources import FIELDS, PREFIX, flags_of

ROOT = DOCS.parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
METRIC = re.compile(r"\b((?:sglang|vllm):\w+)")
ENDS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


def samples() -> dict[str, set[str]]:
    """Name of every sample -> its labels."""
    return {
        name + end: {*labels, *(["le"] if end == "_bucket" else [])}
        for name, kind, labels, _ in exported()
        for end in ENDS.get(kind, ("",))
    }


def dashboard() -> Iterator[tuple[str, str]]:
    """(expression, legend) of every target."""
    for panel in json.loads((DOCS / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def rules() -> Iterator[tuple[str, str]]:
    """(expression, summary) of every alert."""
    for group in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule
            yield rule["expr"], rule["annotations"]["summary"].replace("$labels.", "")


def test_the_pages_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argparse.Namespace(check=True)) == 0, capsys.readouterr().err


def test_every_setting_is_documented_with_its_meaning() -> None:
    page = (DOCS / "flags.md").read_text()
    for name, item in FIELDS.items():
        assert len(item.metadata["say"]) > 8, name
        for spelled in (*flags_of(name), PREFIX + name.upper(), name):
            assert f"`{spelled}`" in page, spelled


def test_every_metric_is_documented_with_its_meaning() -> None:
    page = (DOCS / "metrics.md").read_text()
    names = [name for name, *_ in exported()]
    assert len(names) == len(set(names))
    for name, _, _, say in exported():
        assert len(say) > 4, name
        assert f"| `{name}` |" in page


@pytest.mark.parametrize("read", [dashboard, rules])
def test_expressions_name_series_and_labels_that_exist(read: object) -> None:
    known = samples()
    found = list(read())  # type: ignore[operator]
    assert len(found) > 10
    for expr, text in found:
        assert expr.count("(") == expr.count(")"), expr
        names = METRIC.findall(expr)
        assert names or expr.startswith("up{"), expr
        labels: set[str] = set(SCRAPED)
        for name in names:
            assert name in known, name
            labels |= known[name]
        used = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expr) for label in by.split(",")}
        used |= set(re.findall(r"[{,](\w+)[!=]=?~?\"", expr)) | set(re.findall(r"\{\{\s*(\w+)\s*\}\}", text))
        assert used <= labels, (expr, used - labels)


def test_the_dashboard_has_its_rows_and_no_panel_lies_on_another() -> None:
    panels = json.loads((DOCS / "dashboard.json").read_text())["panels"]
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert len(rows) == 8
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))


def slug(heading: str) -> str:
    """A heading's anchor."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in map(slug, headings), link
