"""A search's TOML file as values: which cores, which messages from outside, which bounds and invariants."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import SpecError
from engine.fsm.load import spec_named
from engine.fsm.owners import resolve, shown

ORDERS = ("pair", "any")
TIMEOUTS = ("never", "quiet", "any")
KEYS = {
    "name": str,
    "say": str,
    "order": str,
    "timeouts": str,
    "states": int,
    "deep": bool,
    "timeout_limit": int,
    "max_states": int,
    "invariants": list,
    "at_end": list,
    "core": list,
    "workload": list,
    "environment": dict,
    "ends": dict,
    "local": list,
    "urgent": list,
}
NEEDED = ("name", "say", "order", "timeouts", "states", "core")


@dataclass(frozen=True)
class Workload:
    """A message from outside. Those with equal `sender` and `to` are sent in file order when order is `pair`.

    after     (core name, state names): only while that core is in one of them; None: at any moment
    optional  it may also never come
    """

    sender: str
    to: str
    message: Any
    after: tuple[str, tuple[str, ...]] | None
    optional: bool


@dataclass(frozen=True)
class Search:
    """One search.

    cores        name -> what builds the core
    environment  builds the process that answers effects and makes choices; None: effects go nowhere
    ends         core name -> states in which a run may end; others may end wherever they needn't leave
    local        cores of one process, with mailboxes: what they send each other is in there at once, and
                 whatever comes from elsewhere arrives behind it
    urgent       structs of messages that take the priority lane of a mailbox
    states       how many states it finds, as committed
    """

    path: Path
    name: str
    say: str
    order: str
    timeouts: str
    states: int
    deep: bool
    timeout_limit: int | None
    max_states: int
    cores: dict[str, Callable[[], Any]]
    workload: tuple[Workload, ...]
    environment: Callable[[], Any] | None
    invariants: tuple[tuple[str, Callable[[Any], bool]], ...]
    at_end: tuple[tuple[str, Callable[[Any], bool]], ...]
    ends: dict[str, tuple[str, ...]]
    local: tuple[str, ...]
    urgent: frozenset[str]


def load_search(path: Path) -> Search:
    """The search in this file.

    raises  SpecError naming the file and the key that is wrong
    """
    where = shown(path)
    try:
        body = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{where}: not TOML: {error}") from error
    _check_keys(where, body, path)
    cores = dict(_core(where, one) for one in body["core"])
    environment = body.get("environment")
    if environment is not None:
        _only(where, "environment", environment, ("make", "args"), ("make",))
        environment = partial(resolve(environment["make"], where), **environment.get("args", {}))
    for name in (*body.get("ends", {}), *body.get("local", ())):
        if name not in cores:
            raise SpecError(f"{where}: ends or local: '{name}' isn't a core; cores: {', '.join(cores)}")
    return Search(
        path=path,
        deep=body.get("deep", False),
        timeout_limit=body.get("timeout_limit"),
        max_states=body.get("max_states", 2_000_000),
        cores=cores,
        workload=tuple(w for one in body.get("workload", ()) for w in _workload(where, one, cores)),
        environment=environment,
        invariants=tuple((name, resolve(name, where)) for name in body.get("invariants", ())),
        at_end=tuple((name, resolve(name, where)) for name in body.get("at_end", ())),
        local=tuple(body.get("local", ())),
        urgent=frozenset(body.get("urgent", ())),
        ends={name: tuple(states) for name, states in body.get("ends", {}).items()},
        **{key: body[key] for key in ("name", "say", "order", "timeouts", "states")},
    )


def _check_keys(where: str, body: dict[str, Any], path: Path) -> None:
    _only(where, "the file", body, tuple(KEYS), NEEDED)
    for key, value in body.items():
        if type(value) is not KEYS[key]:
            raise SpecError(f"{where}: {key} must be of type {KEYS[key].__name__}, not {value!r}")
    if body["name"] != path.stem:
        raise SpecError(f"{where}: name is '{body['name']}' but the file is {path.name}; make them equal")
    for key, known in (("order", ORDERS), ("timeouts", TIMEOUTS)):
        if body[key] not in known:
            raise SpecError(f"{where}: {key} is '{body[key]}'; choose one of {', '.join(known)}")


def _only(where: str, what: str, body: Any, known: tuple[str, ...], needed: tuple[str, ...]) -> None:
    for key in body:
        if key not in known:
            raise SpecError(f"{where}: {what} has the unknown key '{key}'; known: {', '.join(known)}")
    for key in needed:
        if key not in body:
            raise SpecError(f"{where}: {what} lacks the key '{key}'")


def _core(where: str, body: dict[str, Any]) -> tuple[str, Callable[[], Any]]:
    _only(where, "a core", body, ("name", "spec", "make", "args"), ("name",))
    if ("spec" in body) == ("make" in body):
        raise SpecError(f"{where}: core {body['name']} needs either `spec` or `make`")
    args = body.get("args", {})
    if "make" in body:
        return body["name"], partial(resolve(body["make"], where), **args)
    return body["name"], lambda: spec_named(body["spec"]).core(**args)


def _workload(where: str, body: dict[str, Any], cores: dict[str, Callable[[], Any]]) -> list[Workload]:
    known = ("to", "event", "make", "args", "times", "from", "after", "optional")
    _only(where, "a workload", body, known, ("to",))
    to = body["to"]
    if to not in cores:
        raise SpecError(f"{where}: workload to '{to}': no such core; cores: {', '.join(cores)}")
    if ("event" in body) == ("make" in body):
        raise SpecError(f"{where}: workload to {to} needs either `event` or `make`")
    if "make" in body:
        build = resolve(body["make"], where)
    else:
        build = getattr(cores[to]().MESSAGES, body["event"], None)
        if build is None:
            raise SpecError(f"{where}: workload to {to}: there is no message struct '{body['event']}'")
    after = None
    if "after" in body:
        core, dot, states = body["after"].partition(".")
        if not dot or core not in cores:
            raise SpecError(f"{where}: workload to {to}: `after` is 'core.state', not '{body['after']}'")
        after = (core, tuple(state.strip() for state in states.split("|")))
    message = build(**body.get("args", {}))
    one = Workload(
        body.get("from", "outside"),
        to,
        message,
        after,
        body.get("optional", False),
    )
    return [one] * body.get("times", 1)
