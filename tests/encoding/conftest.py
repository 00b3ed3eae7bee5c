"""A chat format with short strings, so that golden prompts are readable."""

import json
from pathlib import Path

import pytest

from engine.model.encoding import Encoding, load_encoding

NANO = Path(__file__).parents[2] / "engine" / "assets" / "nano"


@pytest.fixture(scope="session")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    data = json.loads((NANO / "encoding.json").read_text(encoding="utf-8"))
    data["efforts"] = {"low": "", "high": "HARD\n\n", "max": "HARDEST\n\n"}
    data["templates"]["tools"] = "## Tools {dsml_token} {thinking_start_token}\n{tool_schemas}\nEND\n"
    data["templates"]["response_format"] = "## Format\n{schema}"
    folder = tmp_path_factory.mktemp("format")
    (folder / "encoding.json").write_text(json.dumps(data), encoding="utf-8")
    return load_encoding(folder)
