"""Who may import what: the machines stand alone; a core has no clock, chance, tensor or wait."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.fsm.check import machine_files
from engine.fsm.load import load
from engine.fsm.owners import ROOT

CORES = sorted({load(path).owner.partition(":")[0] for path in machine_files()})
BANNED = {
    "anyio",
    "asyncio",
    "os",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
    "torch",
    "trio",
    "uuid",
}


def imported(file: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports at run time."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def file_of(module: str) -> Path:
    """The file of a module of the engine."""
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"


def test_the_state_machine_package_imports_nothing_else_of_the_engine() -> None:
    for file in (ROOT / "engine" / "fsm").glob("*.py"):
        strangers = {
            name
            for name in imported(file)
            if name.split(".")[0] in ("engine", "api")
            and not name.startswith(("engine.fsm", "engine.errors"))
        }
        assert strangers == set(), file.name


@pytest.mark.parametrize("core", CORES)
def test_a_core_reaches_no_clock_no_chance_no_tensor_and_no_wait(core: str) -> None:
    """Over everything of the engine that the core's module imports, directly or not, the machines apart."""
    seen: set[Path] = set()
    todo = [ROOT / core]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in imported(file):
            assert name.split(".")[0] not in BANNED, f"{file.relative_to(ROOT)} imports {name}"
            if name.startswith("engine.") and not name.startswith("engine.fsm"):
                todo.append(file_of(name))
    assert len(seen) > 1
