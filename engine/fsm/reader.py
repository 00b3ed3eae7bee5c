"""Reads a machine's TOML file: keys and their types. What the values mean is checked in `rules.py`."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

from engine.errors import SpecError
from engine.fsm.owners import resolve, shown
from engine.fsm.spec import Invariant, Row, Spec, State, Timeout

TOP_KEYS = ("name", "owner", "speed", "say", "initial", "final", "states", "events", "on", "never")
OPTIONAL_KEYS = ("invariant", "max_deferred")
ROW_KEYS = ("if", "do", "to", "defer", "ignore", "why", "else")


def read(path: Path) -> Spec:
    """The file as a `Spec` with its keys and their types checked, its meaning not yet."""
    raw = path.read_bytes()
    where = shown(path)
    try:
        document = tomllib.loads(raw.decode())
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not TOML: {error}") from error
    reader = _Reader(where)
    reader.keys("the file", document, TOP_KEYS, OPTIONAL_KEYS)
    if reader.faults:
        raise SpecError("\n".join(reader.faults))
    lines = [n for n, line in enumerate(raw.decode().splitlines(), 1) if re.match(r"\s*\[\[on\]\]", line)]
    texts = ("name", "owner", "speed", "say", "initial")
    fields: dict[str, Any] = {
        **{key: reader.text(key, document[key]) for key in texts},
        "final": reader.texts("final", document["final"]),
        "states": {name: reader.state(name, body) for name, body in document["states"].items()},
        "events": {name: reader.text(f"event {name}", say) for name, say in document["events"].items()},
        "rows": tuple(reader.row(n, lines[n - 1], body) for n, body in enumerate(document["on"], 1)),
        "never": reader.never(reader.texts("never", document["never"])),
        "invariants": tuple(reader.invariant(body) for body in document.get("invariant", ())),
        "max_deferred": document.get("max_deferred", 64),
    }
    if reader.faults:
        raise SpecError("\n".join(reader.faults))
    core = resolve(fields["owner"], where)
    return Spec(path=path, digest=hashlib.sha256(raw).hexdigest(), core=core, **fields)


class _Reader:
    """Types of keys, with all faults collected."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.faults: list[str] = []

    def keys(self, what: str, body: Any, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        if not isinstance(body, dict):
            self.faults.append(f"{self.where}: {what} must be a table")
            return
        allowed = needed + optional
        for key in body:
            if key not in allowed:
                self.faults.append(
                    f"{self.where}: {what} has the unknown key '{key}'; known: {', '.join(allowed)}"
                )
        for key in needed:
            if key not in body:
                self.faults.append(f"{self.where}: {what} lacks the key '{key}'")

    def text(self, what: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            self.faults.append(f"{self.where}: {what} must be a text that isn't empty, not {value!r}")
            return ""
        return value

    def texts(self, what: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list):
            self.faults.append(f"{self.where}: {what} must be a list of texts, not {value!r}")
            return ()
        return tuple(self.text(what, item) for item in value)

    def flag(self, what: str, value: Any) -> bool:
        if value is not True and value is not False:
            self.faults.append(f"{self.where}: {what} must be true or false, not {value!r}")
        return bool(value)

    def state(self, name: str, body: Any) -> State:
        self.keys(f"state {name}", body, ("say",), ("timeout", "must_leave"))
        if not isinstance(body, dict):
            return State(name, "")
        timeout = None
        if "timeout" in body:
            self.keys(f"timeout of state {name}", body["timeout"], ("after_ms", "event"))
            after, event = (body["timeout"].get(key) for key in ("after_ms", "event"))
            if not (isinstance(after, str) and after) and not (type(after) is int and after > 0):
                self.faults.append(
                    f"{self.where}: state {name}: after_ms must be a positive integer or a name"
                )
            timeout = Timeout(after, self.text(f"timeout event of state {name}", event))
        must_leave = self.flag(f"must_leave of state {name}", body.get("must_leave", False))
        return State(name, self.text(f"say of state {name}", body.get("say")), timeout, must_leave)

    def row(self, number: int, line: int, body: dict[str, Any]) -> Row:
        what = f"row {number} (line {line})"
        self.keys(what, body, ("in", "event"), ROW_KEYS)
        states = body.get("in", [])
        if "else" in body and body["else"] != "error":
            self.faults.append(f'{self.where}: {what}: `else` knows only "error", not {body["else"]!r}')
        return Row(
            number=number,
            line=line,
            states=self.texts(f"{what}: in", [states] if isinstance(states, str) else states),
            event=self.text(f"{what}: event", body.get("event", "")),
            guard=self.text(f"{what}: if", body["if"]) if "if" in body else None,
            actions=self.texts(f"{what}: do", body.get("do", [])),
            to=self.text(f"{what}: to", body["to"]) if "to" in body else None,
            defer=self.flag(f"{what}: defer", body.get("defer", False)),
            ignore=self.flag(f"{what}: ignore", body.get("ignore", False)),
            why=self.text(f"{what}: why", body["why"]) if "why" in body else "",
            or_error="else" in body,
        )

    def never(self, lines: tuple[str, ...]) -> frozenset[tuple[str, str]]:
        pairs: set[tuple[str, str]] = set()
        for line in lines:
            event, word, states = line.partition(" in ")
            if not word:
                self.faults.append(f"{self.where}: never: '{line}' isn't of the form 'Event in state, state'")
            for state in (part.strip() for part in states.split(",")):
                if (state, event) in pairs:
                    self.faults.append(f"{self.where}: never: '{event} in {state}' stands there twice")
                pairs.add((state, event))
        return frozenset(pairs)

    def invariant(self, body: Any) -> Invariant:
        self.keys("an invariant", body, ("id", "say", "scope", "check"))
        values = {
            key: self.text(f"invariant: {key}", body.get(key)) for key in ("id", "say", "scope", "check")
        }
        return Invariant(**values)
