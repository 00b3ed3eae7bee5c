"""specs/system.toml as a picture: processes, their actors, and who sends what to whom."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from engine.fsm.system import Actor, System

WORDS_A_LINE = 3


def mermaid_of(system: System, digest: str) -> str:
    """The Mermaid flowchart: a box a process, an arrow a pair of actors."""
    lines = [f"%% sha256: {digest}", "flowchart LR", "    %% who sends what to whom"]
    for process in _processes(system):
        lines.append(f'    subgraph {process}_process["process {process}"]')
        lines += [f'        {one.name}["{_label(one, "<br/>")}"]' for one in _within(system, process)]
        lines.append("    end")
    for (source, target), messages in _arrows(system).items():
        lines.append(f'    {source} -->|"{"<br/>".join(_words(messages))}"| {target}')
    return "\n".join(lines) + "\n"


def dot_of(system: System) -> str:
    """The same picture in DOT."""
    lines = [
        'digraph "system" {',
        'rankdir=LR; fontname="Helvetica"; label="who sends what to whom"; labelloc=t;',
        'node [shape=box, style="rounded,filled", fillcolor="#eef3fb", fontname="Helvetica", fontsize=11];',
        'edge [fontname="Helvetica", fontsize=9];',
    ]
    for process in _processes(system):
        lines.append(f'subgraph cluster_{process} {{ label="process {process}"; fontname="Helvetica";')
        lines += [f'{one.name} [label="{_label(one, chr(92) + "n")}"];' for one in _within(system, process)]
        lines.append("}")
    for (source, target), messages in _arrows(system).items():
        text = r"\n".join(_words(messages))
        lines.append(f'{source} -> {target} [label="{text}"];')
    return "\n".join([*lines, "}"]) + "\n"


def digest_of_file(path: Path) -> str:
    """SHA-256 of the file."""
    return sha256(path.read_bytes()).hexdigest()


def _processes(system: System) -> list[str]:
    return list(dict.fromkeys(actor.process for actor in system.actors.values()))


def _within(system: System, process: str) -> list[Actor]:
    return [actor for actor in system.actors.values() if actor.process == process]


def _label(actor: Actor, newline: str) -> str:
    """Name, mailbox, and what happens when it is full."""
    return f"{actor.name}{newline}{actor.mailbox}, {actor.full}"


def _arrows(system: System) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for link in system.links:
        found.setdefault((link.sender, link.receiver), []).extend(link.messages)
    return found


def _words(messages: list[str]) -> list[str]:
    """Message names, a few a line."""
    return [", ".join(messages[at : at + WORDS_A_LINE]) for at in range(0, len(messages), WORDS_A_LINE)]
