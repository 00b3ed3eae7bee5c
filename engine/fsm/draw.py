"""A machine as a picture: Mermaid text, and DOT for Graphviz.

Rows from one state to another share an arrow. Rows that stay are arrows back to their own state, deferred and
ignored events dashed ones. Time-outs are notes. The first line of each file is the SHA-256 of the spec.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

from engine.fsm.spec import Row, Spec, State

Edge = tuple[str, str, bool]  # from, to, dashed


def mermaid(spec: Spec) -> str:
    """The Mermaid flowchart of a machine."""
    lines = [f"%% sha256: {spec.digest}", "flowchart LR", f"    %% {spec.name}: {spec.say}"]
    lines.append(f"    start_of_run((( ))) --> {spec.initial}")
    for state in spec.states.values():
        shape = ('((("', '")))') if state.name in spec.final else ('("', '")')
        lines.append(f"    {state.name}{shape[0]}<b>{state.name}</b><br/>{_plain(state.say)}{shape[1]}")
        note = timeout_note(state)
        if note:
            lines.append(f'    {state.name} -.- {state.name}_note>"{note}"]')
    for (source, target, dashed), labels in edges(spec).items():
        arrow = "-.->" if dashed else "-->"
        lines.append(f'    {source} {arrow}|"{"<br/>".join(_plain(label) for label in labels)}"| {target}')
    return "\n".join(lines) + "\n"


def dot(spec: Spec) -> str:
    """The same picture in DOT."""
    lines = [
        f'digraph "{spec.name}" {{',
        'rankdir=LR; fontname="Helvetica"; label="' + _quoted(f"{spec.name}: {spec.say}") + '"; labelloc=t;',
        'node [shape=box, style="rounded,filled", fillcolor="#eef3fb", fontname="Helvetica", fontsize=11];',
        'edge [fontname="Helvetica", fontsize=9];',
        'start_of_run [shape=point, label=""];',
        f"start_of_run -> {spec.initial};",
    ]
    for state in spec.states.values():
        rim = ", peripheries=2" if state.name in spec.final else ""
        text = r"\n".join(_quoted(line) for line in (state.name, *_wrapped(state.say)))
        lines.append(f'{state.name} [label="{text}"{rim}];')
        note = timeout_note(state)
        if note:
            lines.append(f'{state.name}_note [shape=note, style="", fontsize=9, label="{_quoted(note)}"];')
            lines.append(f"{state.name} -> {state.name}_note [dir=none, style=dotted];")
    for (source, target, dashed), labels in edges(spec).items():
        style = ", style=dashed, color=gray40, fontcolor=gray40" if dashed else ""
        if dashed and source == target:
            style += ", tailport=s, headport=s"  # Below the state; the solid loop is above it.
        text = r"\l".join(_quoted(label) for label in labels)
        lines.append(f'{source} -> {target} [label="{text}\\l"{style}];')
    return "\n".join([*lines, "}"]) + "\n"


def svg(text: str, digest: str) -> str | None:
    """The picture of this DOT, made by Graphviz's `dot`; None where that program isn't installed.

    digest  SHA-256 of the file that is drawn
    raises  subprocess.CalledProcessError where `dot` refuses the text
    """
    program = shutil.which("dot")
    if program is None:
        return None
    made = subprocess.run([program, "-Tsvg"], input=text, capture_output=True, text=True, check=True)
    # A comment before the XML declaration isn't allowed, so the declaration goes.
    return f"<!-- sha256: {digest} -->\n{made.stdout[made.stdout.index('<svg') :]}"


def edges(spec: Spec) -> dict[Edge, list[str]]:
    """Labels by arrow, in file order."""
    found: dict[Edge, list[str]] = {}
    for row in spec.rows:
        for state in row.states:
            dashed = row.defer or row.ignore
            found.setdefault((state, row.to or state, dashed), []).append(label(row))
    return found


def label(row: Row) -> str:
    """`Event [guard] / action, action`, with what becomes of a deferred or ignored event."""
    fate = " deferred" if row.defer else " ignored" if row.ignore else ""
    guard = f" [{row.guard}]" if row.guard else ""
    actions = f" / {', '.join(row.actions)}" if row.actions else ""
    return f"{row.event}{fate}{guard}{actions}"


def timeout_note(state: State) -> str:
    """What a state's note says; empty without a time-out."""
    if state.timeout is None:
        return ""
    after = state.timeout.after_ms
    duration = f"{after} ms" if isinstance(after, int) else after
    return f"after {duration}: {state.timeout.event}" + ("; must be left" if state.must_leave else "")


def _wrapped(text: str, width: int = 34) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + len(word) >= width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def _plain(text: str) -> str:
    """Text that Mermaid takes inside quotes."""
    return text.replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
