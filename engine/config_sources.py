"""Where settings come from: a flag, else `ENGINE_<FIELD>` of the environment, else the file, else a default.

A file is flat TOML with the fields of `Settings` as its keys. `printed` writes such a file: what it printed
can be served again.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.config import Settings
from engine.errors import ConfigError

PREFIX = "ENGINE_"
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
SECRETS = frozenset({"api_key"})
"""Fields whose value nobody prints."""

DEFAULT = "default"
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}

Sources = dict[str, str]
"""Field -> what set it: `--flag`, `ENGINE_FIELD`, the file's path, or `default`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the settings, and those of the file."""
    own = parser.add_argument_group("where settings come from")
    own.add_argument(
        "--config",
        metavar="FILE",
        default="",
        help="TOML file of settings; a flag wins over ENGINE_<FIELD> in the environment, that over the file",
    )
    own.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting and what set it, as a file for --config, and end",
    )
    add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a field, in the field's order, with its default in the help; absent flags leave no value."""
    for name, item in FIELDS.items():
        say = item.metadata["say"].replace("%", "%%")
        choices = item.metadata["choices"]
        if isinstance(item.default, bool):
            parser.add_argument(
                *flags_of(name),
                dest=name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=say,
            )
            continue
        shown = "" if item.default in ("", 0) else f" (default {item.default})"
        parser.add_argument(
            *flags_of(name),
            dest=name,
            type=type(item.default),
            default=argparse.SUPPRESS,
            choices=choices or None,
            metavar=None if choices else name.upper(),
            help=say + shown,
        )


def kind_of(name: str) -> Any:
    """The type of a field's values: bool, int, float or str."""
    return type(FIELDS[name].default)


def flags_of(name: str) -> tuple[str, ...]:
    """The flags that set a field, its own one first."""
    return ("--" + name.replace("_", "-"), *FIELDS[name].metadata["names"])


def resolve(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> tuple[Settings, Sources]:
    """The settings, and what set each. raises ConfigError, which names the flag, variable or key."""
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FIELDS, DEFAULT)
    given = {name: value for name, value in vars(args).items() if name in FIELDS}
    layers = (
        (read_file(getattr(args, "config", "")), lambda name: args.config),
        (read_environment(os.environ if environ is None else environ), lambda name: PREFIX + name.upper()),
        (given, lambda name: flags_of(name)[0]),
    )
    for layer, source in layers:
        values |= layer
        sources |= {name: source(name) for name in layer}
    return Settings(**values), sources


def read_file(path: str) -> dict[str, Any]:
    """The settings of a TOML file; none for an empty path. raises ConfigError."""
    if not path:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    _refuse_unknown(path, table, FIELDS)
    return {name: _checked(name, value, f"{path}: {name}") for name, value in table.items()}


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings of ENGINE_<FIELD>. raises ConfigError, also for a name of that form without a field."""
    names = [key for key in environ if key.startswith(PREFIX)]
    fields = {PREFIX + name.upper(): name for name in FIELDS}
    _refuse_unknown("environment", names, fields)
    return {fields[key]: _parsed(fields[key], environ[key], key) for key in sorted(names)}


def _refuse_unknown(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ConfigError(f"{where}: {name} is no setting{hint}")


def _parsed(name: str, text: str, where: str) -> Any:
    """A variable's text as its field's type."""
    kind = kind_of(name)
    try:
        value = WORDS[text.strip().lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        shown = "its value" if name in SECRETS else repr(text)
        raise ConfigError(f"{where}: {shown} isn't {KINDS[kind]}") from None
    return _checked(name, value, where)


def _checked(name: str, value: Any, where: str) -> Any:
    """The value, of its field's type and among its choices; whole numbers are numbers, too."""
    kind = kind_of(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        shown = f"a value of type {type(value).__name__}" if name in SECRETS else repr(value)
        raise ConfigError(f"{where}: {shown} isn't {KINDS[kind]}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{where}: {value} isn't finite")
    choices = FIELDS[name].metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{where}: {value!r} isn't one of {', '.join(map(repr, choices))}")
    return value


def printed(settings: Settings, sources: Sources) -> str:
    """TOML of every setting, each with what set it. A secret stands as a comment without its value."""
    lines = ["# A file for --config. Behind each setting: what set it."]
    for name in FIELDS:
        value = getattr(settings, name)
        if name in SECRETS and value:
            lines.append(f"# {name} = (masked)  # {sources[name]}")
        else:
            lines.append(f"{name} = {literal(value)}  # {sources[name]}")
    return "\n".join(lines) + "\n"


def literal(value: bool | int | float | str) -> str:
    """A TOML value."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
