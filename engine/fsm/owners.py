"""Names written as `folder/file.py:Name` in specs and searches, turned into Python objects."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import SpecError

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "specs"


def resolve(name: str, where: str) -> Any:
    """The object that `folder/file.py:Name` names; the path is relative to the repository's root.

    raises  SpecError that starts with `where` when the form, the file or the name is wrong
    """
    path, colon, attribute = name.partition(":")
    if not colon or not path.endswith(".py") or not attribute:
        raise SpecError(f"{where}: '{name}' isn't of the form 'folder/file.py:Name'")
    module = module_at(path, where)
    if not hasattr(module, attribute):
        raise SpecError(f"{where}: {path} has no '{attribute}'; define it there or correct '{name}'")
    return getattr(module, attribute)


def module_at(path: str, where: str) -> ModuleType:
    """The module in the file `path`, relative to the root, imported once under its dotted name."""
    dotted = path.removesuffix(".py").replace("/", ".")
    if dotted in sys.modules:
        return sys.modules[dotted]
    if path.startswith("engine/"):
        try:
            return importlib.import_module(dotted)
        except ImportError as error:
            raise SpecError(f"{where}: can't import {path}: {error}") from error
    # Search worlds and examples lie outside the package, where no import path leads.
    file = ROOT / path
    if not file.is_file():
        raise SpecError(f"{where}: there is no file {path}")
    found = importlib.util.spec_from_file_location(dotted, file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[dotted] = module
    found.loader.exec_module(module)
    return module


def shown(path: Path) -> str:
    """A path as errors and reports print it: relative to the root where it lies inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
