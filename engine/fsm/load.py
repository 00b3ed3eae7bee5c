"""Specs, loaded and checked once a process: what cores, diagrams and searches share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import SpecError
from engine.fsm.owners import SPECS
from engine.fsm.reader import read
from engine.fsm.rules import faults
from engine.fsm.spec import Spec


def load(path: Path) -> Spec:
    """The spec in this file; every name resolved, every (state, event) pair answered.

    raises  SpecError with every fault found, one a line: file, line, row and what to do
    """
    spec = read(path)
    found = faults(spec)
    if found:
        raise SpecError("\n".join(found))
    return spec


_loaded: dict[str, Spec] = {}


def spec_named(name: str) -> Spec:
    """The spec of specs/NAME.toml, loaded and checked once a process."""
    if name not in _loaded:
        _loaded[name] = load(SPECS / f"{name}.toml")
    return _loaded[name]


@contextmanager
def substituted(spec: Spec) -> Iterator[None]:
    """Within the block `spec_named` gives this spec under its name: for searches of changed specs."""
    before = _loaded.get(spec.name)
    _loaded[spec.name] = spec
    try:
        yield
    finally:
        if before is None:
            del _loaded[spec.name]
        else:
            _loaded[spec.name] = before
