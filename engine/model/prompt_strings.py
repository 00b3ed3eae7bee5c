"""The fixed strings of a checkpoint's chat format, read as data and never executed.

Two sources with one meaning: `encoding.json` (ours), or the literal assignments of a DeepSeek checkpoint's
`encoding/encoding_dsv4.py`, taken from its syntax tree.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

TOKENS = ("bos", "eos", "user", "assistant", "latest_reminder", "think_start", "think_end", "dsml")
TEMPLATES = ("tools", "response_format", "tool_call", "tool_calls", "tool_output")
DEFAULT_PAD = "<｜▁pad▁｜>"

# Ours -> the name of the assignment in a DeepSeek encoder module.
MODULE_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "user": "USER_SP_TOKEN",
    "assistant": "ASSISTANT_SP_TOKEN",
    "latest_reminder": "LATEST_REMINDER_SP_TOKEN",
    "think_start": "thinking_start_token",
    "think_end": "thinking_end_token",
    "dsml": "dsml_token",
}
MODULE_TEMPLATES = {
    "tools": "TOOLS_TEMPLATE",
    "response_format": "response_format_template",
    "tool_call": "tool_call_template",
    "tool_calls": "tool_calls_template",
    "tool_output": "tool_output_template",
}


@dataclass(frozen=True, slots=True)
class PromptStrings:
    """Everything of a chat format that is text rather than rule.

    tokens     special-token strings by the names in `TOKENS`, and `pad`
    tasks      quick-instruction task -> its token
    efforts    reasoning effort -> prefix of the prompt; "" for none
    templates  by the names in `TEMPLATES`, with `{placeholder}`s
    """

    tokens: Mapping[str, str]
    tasks: Mapping[str, str]
    efforts: Mapping[str, str]
    default_effort: str
    templates: Mapping[str, str]
    block_name: str

    @property
    def specials(self) -> tuple[str, ...]:
        """Every special-token string, without repeats."""
        return tuple(dict.fromkeys((*self.tokens.values(), *self.tasks.values())))


def load_strings(model_path: Path) -> PromptStrings:
    """The strings of the checkpoint in `model_path`; its `encoding.json` wins. Raises ConfigError."""
    own = model_path / "encoding.json"
    module = model_path / "encoding" / "encoding_dsv4.py"
    if own.is_file():
        return strings_from_json(own)
    if module.is_file():
        return strings_from_module(module)
    raise ConfigError(f"{model_path} has neither encoding.json nor encoding/encoding_dsv4.py")


def strings_from_json(path: Path) -> PromptStrings:
    """Strings of an `encoding.json`. Raises ConfigError where a part is missing or isn't text."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    efforts = _texts(data, "efforts", path)
    default = data.get("default_effort")
    if not isinstance(default, str) or default not in efforts:
        raise ConfigError(f"{path}: default_effort {default!r} is none of {sorted(efforts)}")
    return PromptStrings(
        tokens=_with_keys(_texts(data, "tokens", path), (*TOKENS, "pad"), path, "tokens"),
        tasks=_texts(data, "tasks", path),
        efforts=efforts,
        default_effort=default,
        templates=_with_keys(_texts(data, "templates", path), TEMPLATES, path, "templates"),
        block_name=_text(data, "tool_calls_block_name", path),
    )


def strings_from_module(path: Path) -> PromptStrings:
    """Strings of a DeepSeek encoder module, from its literals. Raises ConfigError naming the missing one."""
    found = literal_assignments(path)
    efforts, default = _module_efforts(found, path)
    tokens = {ours: _text(found, theirs, path) for ours, theirs in MODULE_TOKENS.items()}
    return PromptStrings(
        tokens={**tokens, "pad": DEFAULT_PAD},
        tasks=_texts(found, "DS_TASK_SP_TOKENS", path),
        efforts=efforts,
        default_effort=default,
        templates={ours: _text(found, theirs, path) for ours, theirs in MODULE_TEMPLATES.items()},
        block_name=_text(found, "tool_calls_block_name", path),
    )


def literal_assignments(path: Path) -> dict[str, Any]:
    """Top-level `name = literal` of a Python file, without running it. Raises ConfigError."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} can't be parsed: {error}") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node, (ast.Assign, ast.AnnAssign)):
                _keep_literal(found, target.id, node.value)
    return found


def _keep_literal(found: dict[str, Any], name: str, value: ast.expr | None) -> None:
    try:
        found[name] = ast.literal_eval(value) if value is not None else None
    except (ValueError, TypeError):
        # Built from other names; those parts are structure, which `encoding.py` has as code.
        return


def _module_efforts(found: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str]:
    """The later generation has a table with a default; the preview has one text, for `max`."""
    if "REASONING_EFFORT_PROMPTS" in found:
        efforts = _texts(found, "REASONING_EFFORT_PROMPTS", path)
        default = _text(found, "DEFAULT_REASONING_EFFORT", path)
        if default not in efforts:
            raise ConfigError(f"{path}: DEFAULT_REASONING_EFFORT {default!r} is none of {sorted(efforts)}")
        return efforts, default
    return {"high": "", "max": _text(found, "REASONING_EFFORT_MAX", path)}, "high"


def _text(data: Mapping[str, Any], key: str, path: Path) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise ConfigError(f"{path}: {key} must be a string, not {type(value).__name__}")
    return value


def _texts(data: Mapping[str, Any], key: str, path: Path) -> dict[str, str]:
    value = data.get(key)
    if not isinstance(value, dict) or not all(
        isinstance(k, str) and isinstance(v, str) for k, v in value.items()
    ):
        raise ConfigError(f"{path}: {key} must map strings to strings")
    return value


def _with_keys(found: dict[str, str], keys: tuple[str, ...], path: Path, part: str) -> dict[str, str]:
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(f"{path}: {part} lacks {', '.join(missing)}")
    return found
