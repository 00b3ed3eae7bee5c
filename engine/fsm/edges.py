"""The drawn arrows, checked by a second reader: `transitions`' GraphMachine, fed from the file itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from transitions.extensions import GraphMachine

Arrow = tuple[str, str, str]  # from, to, event


def drawn(text: str) -> set[Arrow]:
    """Arrows of our Mermaid text."""
    found = set()
    for source, labels, target in re.findall(r'^    (\w+) -\.?->\|"(.*)"\| (\w+)$', text, re.MULTILINE):
        for label in labels.split("<br/>"):
            found.add((source, target, re.split(r"\W", label)[0]))
    return found


def by_library(path: Path) -> set[Arrow]:
    """Arrows that the library draws for the machine in this file; it reads the TOML without our loader."""
    body = tomllib.loads(path.read_text())
    machine = GraphMachine(
        states=list(body["states"]),
        initial=body["initial"],
        auto_transitions=False,
        graph_engine="mermaid",
    )
    for row in body["on"]:
        machine.add_transition(row["event"], row["in"], row.get("to"))
    found = set()
    for source, target, labels in re.findall(r"^  (\w+) --> (\w+): (.*)$", _source(machine), re.MULTILINE):
        for label in labels.split(" | "):
            found.add((source, target, label.removesuffix(" [internal]")))
    return found


def _source(machine: GraphMachine) -> str:
    return str(machine.get_graph().source)


def difference(text: str, path: Path) -> list[str]:
    """What one reader draws and the other doesn't, one line each; empty where they agree."""
    ours, theirs = drawn(text), by_library(path)
    return [f"{a} -> {b} on {event}: only in our drawing" for a, b, event in sorted(ours - theirs)] + [
        f"{a} -> {b} on {event}: missing from our drawing" for a, b, event in sorted(theirs - ours)
    ]
