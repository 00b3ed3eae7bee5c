"""system.toml: actors, mailboxes and links are checked against machines and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import SpecError
from engine.fsm.load import spec_named
from engine.fsm.spec import Spec
from engine.fsm.system import load_system
from tests.specs.data import oven as messages

TEXT = """
[actors.baker]
say = "Wants bread."
process = "shop"
mailbox = 4
full = "reject"
[actors.oven]
say = "Bakes."
spec = "oven"
process = "kitchen"
mailbox = 4
full = "wait"
[actors.heater]
say = "Heats."
process = "kitchen"
mailbox = 2
full = "merge"
merge = ["Baked"]
[[sends]]
from = "baker"
to = "oven"
messages = ["Tray", "SwitchOff"]
[[sends]]
from = "heater"
to = "oven"
messages = ["Baked"]
[[sends]]
from = "oven"
to = ["baker", "heater"]
messages = ["Baked"]
"""

WRONG = {
    "policy": ('full = "wait"', 'full = "drop"', "choose one of reject, wait, merge"),
    "mailbox": ("mailbox = 2", "mailbox = 0", "mailbox must be a positive integer"),
    "merge": ('merge = ["Baked"]\n', "", "lists the mergeable messages"),
    "unknown key": ('process = "shop"', 'process = "shop"\nsize = 3', "unknown key 'size'"),
    "machine": ('spec = "oven"', 'spec = "stove"', "no machine 'stove'"),
    "actor": ('from = "baker"', 'from = "butcher"', r"'butcher' isn't in \[actors\]"),
    "struct": ('"SwitchOff"', '"SwitchOf"', "no message struct 'SwitchOf'"),
    "no sender": (', "SwitchOff"', "", "nobody sends SwitchOff"),
    "no event": (
        'messages = ["Tray"',
        'messages = ["Stray", "Tray"',
        "Stray is sent to it and isn't an event",
    ),
    "cycle": (
        'full = "reject"',
        'full = "wait"',
        "wait in a circle on full mailboxes: baker -> oven -> baker",
    ),
}


class Stray:
    """A struct that no machine knows."""


@pytest.fixture
def specs(oven: Spec) -> dict[str, Spec]:
    return {"oven": spec_named("oven")}


def test_a_sound_system_loads(tmp_path: Path, specs: dict[str, Spec]) -> None:
    file = tmp_path / "system.toml"
    file.write_text(TEXT)
    system = load_system(file, specs, messages)
    assert system.actors["oven"].full == "wait"
    assert system.into("oven") == {"Tray", "SwitchOff", "Baked"}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_system_is_refused(
    name: str, tmp_path: Path, specs: dict[str, Spec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "Stray", Stray, raising=False)
    old, new, message = WRONG[name]
    assert old in TEXT
    file = tmp_path / "system.toml"
    file.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(SpecError, match=message):
        load_system(file, specs, messages)


def test_a_machine_needs_an_actor(tmp_path: Path, specs: dict[str, Spec]) -> None:
    file = tmp_path / "system.toml"
    file.write_text(TEXT.replace('spec = "oven"\n', ""))
    with pytest.raises(SpecError, match="machine oven belongs to no actor"):
        load_system(file, specs, messages)
