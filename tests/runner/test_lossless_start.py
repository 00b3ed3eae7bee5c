"""`serve --speculative dspark` where there is nothing to draft with, or it doesn't fit: says so, and ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import NANO

pytestmark = pytest.mark.slow

NO_DRAFT = dict.fromkeys(
    name for name in json.loads((NANO / "config.json").read_text()) if name.startswith("dspark_")
)
"""Fields to leave out."""


def started(folder: Path, changes: dict[str, Any], *flags: str) -> tuple[int, str]:
    """(exit code, what it printed) of a server with random weights."""
    fields = json.loads((NANO / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    for file in ("encoding.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).symlink_to(NANO / file)
    command = [
        *(sys.executable, "-m", "engine", "serve", "--model-path", str(folder), "--port", "0"),
        *("--load-format", "dummy", "--threads", "1", "--max-total-tokens", "8192"),
        *("--max-running-requests", "4", "--speculative", "dspark", *flags),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("changes", "flags", "said"),
    [
        (NO_DRAFT, (), ["CheckpointError", "speculation needs a draft, but the checkpoint has no mtp.*"]),
        ({"dspark_sts_temperatures": [1.0] * 3}, (), ["holds 3 temperatures", "5"]),
        ({"dspark_target_layer_ids": [5, 6, 9]}, (), ["dspark_target_layer_ids", "9"]),
        ({"dspark_noise_token_id": 9000}, (), ["dspark_noise_token_id", "9000", "8192"]),
        ({}, ("--speculative-num-draft-tokens", "128"), ["is 128, but must be in [0, 127]"]),
    ],
    ids=["no draft", "temperatures", "taps", "noise", "block"],
)
def test_a_draft_that_is_missing_or_does_not_fit_ends_the_start(
    tmp_path: Path, changes: dict[str, Any], flags: tuple[str, ...], said: list[str]
) -> None:
    ended, printed = started(tmp_path, changes, *flags)
    for part in said:
        assert part in printed
    assert ended == 1
    assert "Traceback" not in printed
