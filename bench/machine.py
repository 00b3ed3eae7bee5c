"""`python -m engine bench machine`: one event through the compiled table and through `transitions`.

Both machines are built from bench/turnstile.toml; each event takes a guarded row with one
action into another state.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from engine.actors.core import Core
from engine.fsm.library import LibraryMachine
from engine.fsm.load import load, substituted
from engine.fsm.owners import ROOT
from engine.fsm.spec import Spec
from engine.fsm.table import Machine, Table
from engine.fsm.vector import Slots, VectorMachine

REPEATS = 7
BATCH = 256


class Coin(msgspec.Struct, frozen=True):
    """A coin."""

    value: int


class Jam(msgspec.Struct, frozen=True):
    """The end of the turnstile."""


class Turnstile(Core):
    """Counts coins."""

    SPEC = "turnstile"
    DATA = ("coins",)
    MESSAGES = sys.modules[__name__]

    def __init__(self) -> None:
        super().__init__()
        self.coins = 0
        self.price = 2

    def is_enough(self, msg: Coin) -> bool:
        """Guard."""
        return msg.value >= self.price

    def count_coin(self, msg: Coin) -> None:
        """Action."""
        self.coins += 1


class Turnstiles:
    """Many of them as an array: the same rows, a column of coins in each event."""

    def __init__(self, spec: Spec) -> None:
        self.machine = VectorMachine(Table(replace(spec, speed="array", core=Turnstiles)), self, BATCH)
        self.coins = np.zeros(BATCH, np.int64)

    def is_enough(self, slots: Slots, msg: Any) -> Any:
        """Guard."""
        return msg >= 2

    def count_coin(self, slots: Slots, at: Slots, msg: Any) -> None:
        """Action."""
        self.coins[slots] += 1


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Figures in nanoseconds, best of seven.

    table_ns, library_ns    one `fire`
    ratio                   library over table
    receive_ns              one `receive` of a core on the compiled table, effects included
    array_ns                one slot of an array of 256, all fired at once
    """
    spec = load(ROOT / "bench" / "turnstile.toml")
    with substituted(spec):
        core = Turnstile()
    table = Table(spec)
    coin, event = Coin(2), table.event_index["Coin"]
    fast, slow = Machine(table, core), LibraryMachine(table, core)
    many, slots, coins = Turnstiles(spec).machine, np.arange(BATCH), np.full(BATCH, 2)
    calls: dict[str, Callable[[], float]] = {
        "table_ns": lambda: nanoseconds(1_000, fast.fire, event, coin),
        "library_ns": lambda: nanoseconds(1_000, slow.fire, event, coin),
        "receive_ns": lambda: nanoseconds(1_000, lambda event, msg: core.receive(msg), event, coin),
        "array_ns": lambda: nanoseconds(100, lambda event, msg: many.fire(event, slots, msg), event, coins),
    }
    # Rounds take turns, so that a busy moment of the machine doesn't hit all rounds of one figure.
    rounds = [{name: call() for name, call in calls.items()} for _ in range(REPEATS)]
    figures = {name: min(one[name] for one in rounds) for name in calls}
    figures["array_ns"] /= BATCH
    figures["ratio"] = figures["library_ns"] / figures["table_ns"]
    return {name: round(value, 1) for name, value in figures.items()}


def nanoseconds(number: int, fire: Callable[[int, Any], object], event: int, msg: Any) -> float:
    """Of one call, the mean of `number`, the loop included."""
    began = time.perf_counter_ns()
    for _ in range(number):
        fire(event, msg)
    return (time.perf_counter_ns() - began) / number
