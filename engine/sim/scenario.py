"""specs/scenarios/*.toml: a workload, faults and bounds, as data; and the plan that a data seed makes of it.

A number may be written as a range `[low, high]`: the data seed draws from it. A plan is a scenario whose
clients are listed and whose numbers are drawn; it can be written as a file and replayed as it is.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.errors import ConfigError
from engine.fsm.owners import SPECS, shown

SCENARIOS = SPECS / "scenarios"

Range = float | tuple[float, float]

Kind = Literal["handle", "stream", "whole"]
"""How a client speaks: to the engine's handle, by a streamed HTTP answer, by one in one piece."""

Temper = Literal["reads", "dawdles", "sleeps", "leaves"]
"""Takes what comes; pauses between chunks; takes nothing for long; goes away before the end."""

KINDS: dict[Kind, float] = {"handle": 3.0, "stream": 1.0, "whole": 0.5}
TEMPERS: dict[Temper, float] = {"reads": 1.0}


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A table of a scenario file; unknown keys are refused."""


class Bounds(Part, frozen=True):
    """Sizes of the engine under test; as RankSetup and Settings, where the names agree.

    failing    one in so many sampled rows fails; 0 none      eos      one in so many tokens is EOS
    mailbox    sizes of mailboxes that differ from system.toml
    limit_s    virtual seconds after which a run that has not ended hangs
    step_ms, load_ms         duration of a step, of loading a rank
    link_ms, exchange_ms     delay of a message between api and rank, between ranks
    probe_s    virtual seconds between two questions to the health routes; 0: none
    drafts     drafted tokens of a round; 0: plain decoding     verify_mode   as in Settings
    draft_ms   what the ranks believe that drafting costs a step of 10 ms
    draft_right    chance of a draft to be the token that follows
    """

    ranks: int = 2
    slots: int = 4
    queued: int = 6
    chunk_tokens: int = 300
    context_tokens: int = 1500
    full_pages: int = 9
    window_pages: int = 9
    graphs: tuple[int, ...] = (1, 2, 4, 64)
    watchdog_ms: int = 2000
    drain_s: float = 5.0
    snapshot_s: float = 1.0
    stream_buffer: int = 8
    limit_s: float = 300.0
    eos: int = 40
    failing: int = 0
    mailbox: dict[str, int] = {}
    step_ms: Range = (5, 30)
    load_ms: Range = (0, 50)
    link_ms: Range = (0, 2)
    exchange_ms: Range = (0, 1)
    probe_s: float = 0.0
    drafts: int = 0
    verify_mode: Literal["static", "cap-accept", "compact"] = "compact"
    draft_ms: float = 2.0
    draft_right: float = 0.7


class Workload(Part, frozen=True):
    """Clients by their number and their ranges. Chances are shares of clients; weights are relative.

    within_s   they arrive in so many seconds       n    completions of one request
    stop, deadline, routed, rid   chance of a stop string, a deadline, a demanded rank, an id of their own
    """

    clients: Range = 8
    within_s: float = 0.5
    prompt: Range = (1, 300)
    tokens: Range = (1, 16)
    n: Range = 1
    kinds: dict[Kind, float] = msgspec.field(default_factory=lambda: dict(KINDS))
    tempers: dict[Temper, float] = msgspec.field(default_factory=lambda: dict(TEMPERS))
    pause_s: Range = (0, 1)
    leaves_after: Range = (0, 900)
    stop: float = 0.2
    deadline: float = 0.0
    deadline_s: Range = (0.05, 1)
    routed: float = 0.1
    rid: float = 0.1
    priority: Range = (0, 1)


class Client(Part, frozen=True):
    """One client. `leaves_after`: bytes of HTTP, or chunks of a handle, after which it goes away."""

    at_s: float = 0.0
    kind: Kind = "handle"
    temper: Temper = "reads"
    prompt: int = 1
    tokens: int = 1
    n: int = 1
    seed: int = 0
    pause_s: float = 0.0
    leaves_after: int = 0
    stop: str = ""
    deadline_s: float = 0.0
    route: int = -1
    rid: str = ""
    priority: int = 0


class Fault(Part, frozen=True):
    """One fault; `kind` is a name of faults.py, which says what the other fields mean. `rank` -1: any."""

    kind: str
    at_s: Range = 0.0
    chance: float = 1.0
    rank: int = -1
    for_s: Range = 0.0
    by_s: Range = 0.0
    bytes: Range = 0
    messages: Range = 0


class Scenario(Part, frozen=True):
    """A file of specs/scenarios or tests/seeds. Of `workload` and `client` one is given.

    data, order  seeds of a failure that is kept; `found` says what it was
    """

    say: str
    bounds: Bounds = Bounds()
    workload: Workload | None = None
    client: tuple[Client, ...] = ()
    fault: tuple[Fault, ...] = ()
    data: int = 0
    order: int = 0
    found: str = ""

    def kept_as(self, data: int, order: int, found: str) -> Scenario:
        """The same with the seeds of a failure and what it was."""
        return msgspec.structs.replace(self, data=data, order=order, found=found)


def scenario_files() -> list[Path]:
    """All scenarios that ship."""
    return sorted(SCENARIOS.glob("*.toml"))


def load_scenario(name: str) -> Scenario:
    """The scenario of this file, or of specs/scenarios/NAME.toml. Raises ConfigError that names the key."""
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario, strict=False)
    except OSError as error:
        known = ", ".join(file.stem for file in scenario_files())
        raise ConfigError(f"{path} can't be read: {error.strerror}; scenarios: {known}") from error
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{shown(path)}: {error}") from error


def plan_of(scenario: Scenario, data: int) -> Scenario:
    """The scenario with every client listed and every number drawn; equal for equal seeds."""
    draw = random.Random(f"{scenario.say} {data}")
    bounds = scenario.bounds
    clients = scenario.client
    if scenario.workload is not None:
        clients = _clients(scenario.workload, bounds, draw)
    faults = tuple(
        _fault(fault, bounds.ranks, draw) for fault in scenario.fault if draw.random() < fault.chance
    )
    return msgspec.structs.replace(scenario, bounds=bounds, workload=None, client=clients, fault=faults)


def _fault(fault: Fault, ranks: int, draw: random.Random) -> Fault:
    rank = draw.randrange(ranks) if fault.rank < 0 else fault.rank
    names = ("at_s", "for_s", "by_s", "bytes", "messages")
    values = {name: number_in(getattr(fault, name), draw) for name in names}
    return msgspec.structs.replace(fault, rank=rank, chance=1.0, **values)


def _clients(work: Workload, bounds: Bounds, draw: random.Random) -> tuple[Client, ...]:
    clients = []
    for number in range(_whole(work.clients, draw)):
        kind, temper = _weighted(work.kinds, draw), _weighted(work.tempers, draw)
        clients.append(
            Client(
                at_s=round(draw.uniform(0, work.within_s), 3),
                kind=kind,
                temper=temper,
                prompt=_whole(work.prompt, draw),
                tokens=_whole(work.tokens, draw),
                n=_whole(work.n, draw),
                seed=draw.getrandbits(31),
                pause_s=number_in(work.pause_s, draw) if temper in ("dawdles", "sleeps") else 0.0,
                leaves_after=_leaves_after(kind, temper, work, draw),
                stop=draw.choice(("e", " w", "tion", "is")) if draw.random() < work.stop else "",
                deadline_s=number_in(work.deadline_s, draw) if draw.random() < work.deadline else 0.0,
                route=draw.randrange(bounds.ranks) if draw.random() < work.routed else -1,
                rid=f"client-{number % 5}" if draw.random() < work.rid else "",
                priority=_whole(work.priority, draw),
            )
        )
    return tuple(clients)


def _leaves_after(kind: str, temper: str, work: Workload, draw: random.Random) -> int:
    if temper != "leaves":
        return 0
    return draw.randint(0, 6) if kind == "handle" else _whole(work.leaves_after, draw)


def number_in(value: Range, draw: random.Random) -> float:
    """The number itself, or one of the range, to three places."""
    return round(draw.uniform(*value), 3) if isinstance(value, tuple) else value


def drawn(value: Range) -> float:
    """A number of a plan, in which no range is left."""
    assert not isinstance(value, tuple)
    return value


def _whole(value: Range, draw: random.Random) -> int:
    return draw.randint(int(value[0]), int(value[1])) if isinstance(value, tuple) else int(value)


def _weighted(weights: Mapping[Any, float], draw: random.Random) -> Any:
    return draw.choices(list(weights), list(weights.values()))[0]
