"""A plan written as a file of specs/scenarios."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sim.scenario import Scenario


def as_toml(plan: Scenario) -> str:
    """A plan as a file that `load_scenario` reads to the same plan."""
    body = msgspec.to_builtins(plan)
    lines = [
        f"{key} = {_value(value)}" for key, value in body.items() if key not in ("bounds", "client", "fault")
    ]
    if body.get("bounds"):
        lines += ["", "[bounds]", *_pairs(body["bounds"])]
    for table in ("client", "fault"):
        for item in body.get(table, ()):
            lines += ["", f"[[{table}]]", *_pairs(item)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items()]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{ " + ", ".join(_pairs(value)) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
