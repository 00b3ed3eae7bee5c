"""Where settings come from, in which order, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from pathlib import Path

import pytest

from engine.config import Settings
from engine.config_sources import FIELDS, add_arguments, printed, resolve
from engine.errors import ConfigError


def resolved(
    tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, *flags: str
) -> tuple[Settings, dict[str, str]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    file = tmp_path / "engine.toml"
    file.write_text(text)
    return resolve(parser.parse_args(["--config", str(file), *flags]), environ or {})


def test_a_flag_wins_over_the_environment_that_over_the_file_and_that_over_the_default(
    tmp_path: Path,
) -> None:
    text = "port = 1\nmax_n = 2\ndrain_s = 3\nchunked_prefill_size = 4\n"
    environ = {"ENGINE_PORT": "10", "ENGINE_MAX_N": "20", "OTHER_PORT": "5"}
    settings, sources = resolved(tmp_path, text, environ, "--port", "100", "--dp", "2")
    assert (settings.port, settings.max_n, settings.chunked_prefill_size, settings.dp_size) == (100, 20, 4, 2)
    assert settings.drain_s == 3.0
    assert type(settings.drain_s) is float, "a whole number is a number of seconds"
    file = str(tmp_path / "engine.toml")
    shown = [sources[name] for name in ("port", "max_n", "drain_s", "host")]
    assert shown == ["--port", "ENGINE_MAX_N", file, "default"]


def test_a_switch_that_the_file_turns_on_can_be_turned_off_by_variable_and_flag(tmp_path: Path) -> None:
    text = "deterministic = true\n"
    assert resolved(tmp_path, text)[0].deterministic
    assert not resolved(tmp_path, text, {"ENGINE_DETERMINISTIC": "off"})[0].deterministic
    on = {"ENGINE_DETERMINISTIC": "1"}
    assert not resolved(tmp_path, text, on, "--no-deterministic")[0].deterministic
    assert resolved(tmp_path, "", {}, "--enable-deterministic-inference")[0].deterministic


@pytest.mark.parametrize(
    ("text", "environ", "says"),
    [
        ("prot = 1", {}, "prot is no setting; the nearest is port"),
        ("xyzzy = 1", {}, "xyzzy is no setting"),
        ("", {"ENGINE_MAX_RUNING_REQUESTS": "1"}, "the nearest is ENGINE_MAX_RUNNING_REQUESTS"),
        ("port = 'a'", {}, "port: 'a' isn't a whole number"),
        ("port = true", {}, "port: True isn't a whole number"),
        ("port = 1.5", {}, "port: 1.5 isn't a whole number"),
        ("deterministic = 1", {}, "deterministic: 1 isn't true or false"),
        ("host = 1", {}, "host: 1 isn't a text"),
        ("drain_s = inf", {}, "drain_s: inf isn't finite"),
        ("[port]\na = 1", {}, "isn't a whole number"),
        ("device = 'gpu'", {}, "device: 'gpu' isn't one of 'cpu', 'cuda'"),
        ("api_key = 12345", {}, "api_key: a value of type int isn't a text"),
        ("", {"ENGINE_PORT": "tcp://10.0.0.1:80"}, "ENGINE_PORT: 'tcp://10.0.0.1:80' isn't a whole number"),
        ("", {"ENGINE_DETERMINISTIC": "maybe"}, "ENGINE_DETERMINISTIC: 'maybe' isn't true or false"),
        ("", {"ENGINE_DEVICE": "gpu"}, "ENGINE_DEVICE: 'gpu' isn't one of"),
        ("port =", {}, "engine.toml: Invalid value"),
        ("max_n = 0", {}, "--max-n is 0, but must be at least 1"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, text, environ)
    assert says in str(caught.value)
    assert "12345" not in str(caught.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(ConfigError, match=r"nowhere\.toml: No such file"):
        resolve(parser.parse_args(["--config", str(tmp_path / "nowhere.toml")]), {})


def test_what_is_printed_has_every_setting_without_secrets_and_can_be_served_again(tmp_path: Path) -> None:
    name = 'quote " \\ back\tslash \x7f ü'
    environ = {
        "ENGINE_SERVED_MODEL_NAME": name,
        "ENGINE_API_KEY": "open sesame",  # pragma: allowlist secret
        "ENGINE_DRAIN_S": "1e-7",
    }
    settings, sources = resolved(tmp_path, "", environ, "--dp", "2")
    text = printed(settings, sources)
    assert "open sesame" not in text
    assert "# api_key = (masked)  # ENGINE_API_KEY" in text
    read = tomllib.loads(text)
    assert set(read) == set(FIELDS) - {"api_key"}
    assert read["served_model_name"] == name
    again, _ = resolved(tmp_path, text)
    assert dataclasses.replace(again, api_key=settings.api_key) == settings
