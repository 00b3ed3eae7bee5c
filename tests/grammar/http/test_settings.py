"""Flags of structured output: SGLang's spellings, refusals by name, and what the service is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from engine.config import Settings
from engine.config_sources import add_arguments
from engine.errors import ConfigError, StoreUnusable
from engine.front import make_folder, store_of


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(flags)


def test_one_backend_is_accepted_and_others_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed("--grammar-backend", "xgrammar").grammar_backend == "xgrammar"
    for other in ("outlines", "llguidance", "none"):
        with pytest.raises(SystemExit):
            parsed("--grammar-backend", other)
        assert repr(other) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"grammar_workers": -1}, "--grammar-workers"),
        ({"grammar_timeout_s": 0.0}, "--grammar-timeout"),
        ({"grammar_cache_bytes": 0}, "--grammar-cache-bytes"),
        ({"grammar_cache_entries": 0}, "--grammar-cache-entries"),
        ({"grammar_cache_disk_bytes": 0}, "--grammar-cache-disk-bytes"),
        (
            {"grammar_whitespace": "flexible", "constrained_json_disable_any_whitespace": True},
            "--constrained-json-disable-any-whitespace",
        ),
    ],
)
def test_a_limit_that_is_none_is_refused_with_its_flag(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        Settings(**settings)


def test_the_store_is_in_the_users_cache_where_it_is_told_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(store_of(Settings())).parent.parent == tmp_path
    assert store_of(Settings(grammar_cache_dir=str(tmp_path / "here"))) == str(tmp_path / "here")
    assert store_of(Settings(grammar_cache_dir="none")) == ""


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    make_folder(str(tmp_path / "a" / "b"))
    make_folder(str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file/store"):
        make_folder(str(tmp_path / "file" / "store"))
