"""A wrong spec is refused on load, with file, row and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import SpecError
from engine.fsm.load import load

TEXT = (Path(__file__).parent / "data" / "oven.toml").read_text()

# name: (text to replace, replacement, what the error says)
WRONG = {
    "an unknown key": ('say     = "An ex', 'mood = "good"\nsay     = "An ex', "unknown key 'mood'"),
    "a missing key": ('initial = "cold"\n', "", "lacks the key 'initial'"),
    "an unknown key of a row": (
        'do = ["heat"]',
        'du = ["heat"]',
        r"row 1 \(line 25\) has the unknown key 'du'",
    ),
    "a name that isn't the file's": (
        'name    = "oven"',
        'name = "stove"',
        "name is 'stove' but the file is oven",
    ),
    "an unknown speed": ('speed   = "hot"', 'speed = "warm"', "choose one of hot, cold, array"),
    "a misspelt action": ('"heat"]', '"haet"]', r"oven.toml:25: row 1 .*action 'haet' isn't a method"),
    "a misspelt guard": ('"has_room"', '"has_rom"', r"row 2 .*guard 'has_rom' isn't a method"),
    "a method of the base class": ('do = ["heat"]', 'do = ["emit"]', "'emit' is the base class's own method"),
    "an action with other arguments": ('"heat"]', '"handed_out_in_order"]', r"must take \(self, msg\)"),
    "an unknown state": (
        'to = "baking"',
        'to = "bakign"',
        "'bakign' isn't a state; states: cold, baking, off",
    ),
    "an unknown event": ('event = "Tray"', 'event = "Tary"', r"'Tary' isn't in \[events\]"),
    "an event without struct": (
        "Tray    =",
        'Loaf = "baker: bread"\nTray    =',
        "Loaf: no such message struct",
    ),
    "an event without sender": ('"baker: a tray', '"a tray', "event Tray: write 'SENDER: meaning'"),
    "an unknown timeout event": ('event = "Burnt" }', 'event = "Brunt" }', r"'Brunt' isn't in \[events\]"),
    "must_leave without timeout": ("timeout = { after_ms = 500, ", "# ", "must_leave and has no timeout"),
    "a final state that must be left": ('final   = ["off"]', 'final = ["baking"]', "final and must_leave"),
    "a defer without why": ('why = "The tray in', 'else = "error" #', "needs a `why`"),
    "a row that does nothing": ('do = ["heat_queued"]\nto = "baking"', "", "neither does nor goes"),
    "defer with an action": ("defer = true", 'defer = true\ndo = ["heat"]', "drop `do` and `to`"),
    "a guarded group without end": ('else = "error"\n', "", r"'Baked in baking' must end without a guard"),
    "rows after one without guard": (
        'if = "has_room"\n',
        "",
        "later rows of 'Tray in baking' are never tried",
    ),
    "else without guard": (
        'do = ["say_off"]\n',
        'do = ["say_off"]\nelse = "error"\n',
        "belongs to a row with a guard",
    ),
    "a row and never": (
        '["Next in baking',
        '["Tray in off", "Next in baking',
        "says that this pair can't happen",
    ),
    "a row for an unarmed timeout": (
        'in = "baking"\nevent = "Burnt"',
        'in = ["cold", "baking"]\nevent = "Burnt"',
        "Burnt in cold: state cold doesn't arm this time-out",
    ),
    "an unknown never": (
        '["Next in baking',
        '["Nxt in off", "Next in baking',
        "names an unknown state or event",
    ),
    "a never twice": ('["Next in baking', '["Next in off", "Next in baking', "stands there twice"),
    "an unreachable state": (
        "[states.off]",
        '[states.lit]\nsay = "x"\n[states.off]',
        "state lit can't be reached",
    ),
    "no way to the end": ('do = ["say_off"]\nto = "off"', 'do = ["say_off"]', "can't be reached from"),
    "an unknown core invariant": ('"handed_out_in_order"', '"in_order"', r"has no method 'in_order\(\)'"),
    "an unknown system invariant": (
        '"one_oven_a_tray"',
        '"one_oven"',
        r"has no function 'one_oven\(world\)'",
    ),
    "an unknown scope": ('scope = "core"', 'scope = "all"', "scope is 'core' or 'system'"),
    "an unknown owner": ("oven.py:Oven", "oven.py:Stove", "has no 'Stove'"),
    "an owner without file": ("data/oven.py:Oven", "data/stove.py:Oven", "there is no file"),
    "a wrong type": ("must_leave = true", 'must_leave = "yes"', "must be true or false"),
    "no TOML": ("[events]", "[events", "not TOML"),
}


@pytest.fixture
def load_text(tmp_path: Path) -> Callable[[str], None]:
    def load_it(text: str) -> None:
        file = tmp_path / "oven.toml"
        file.write_text(text)
        load(file)

    return load_it


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_refused_and_told_what_to_do(name: str, load_text: Callable[[str], None]) -> None:
    old, new, message = WRONG[name]
    assert old in TEXT
    with pytest.raises(SpecError, match=message):
        load_text(TEXT.replace(old, new))


def test_the_example_loads(load_text: Callable[[str], None]) -> None:
    load_text(TEXT)


def test_all_unanswered_pairs_are_listed_at_once(load_text: Callable[[str], None]) -> None:
    text = TEXT.replace('never   = ["Next in baking, off"]', "never = []").replace(
        '"cold", "off"]', '"cold"]'
    )
    with pytest.raises(SpecError) as caught:
        load_text(text)
    assert "3 pairs are unanswered" in str(caught.value)
    for pair in ("Next in baking", "Next in off", "Baked in off"):
        assert f"\n  {pair}" in str(caught.value)


def test_all_faults_are_listed_at_once(load_text: Callable[[str], None]) -> None:
    with pytest.raises(SpecError) as caught:
        load_text(TEXT.replace('"has_room"', '"has_rom"').replace('"heat_queued"', '"heat_qeued"'))
    assert "has_rom" in str(caught.value)
    assert "heat_qeued" in str(caught.value)
