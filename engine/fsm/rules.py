"""What is demanded of a spec: names resolve, every pair is answered, states are reachable and left."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

from engine.fsm.owners import shown
from engine.fsm.spec import SPEEDS, Row, Spec


def faults(spec: Spec) -> list[str]:
    """Every fault of the spec, each with file, row and what to do; empty where it is sound."""
    where = shown(spec.path)
    found = [*_names(spec), *_rows(spec)]
    if not found:  # Pairs and reachability of misspelt names would only repeat the fault.
        found = [*_pairs(spec), *_reach(spec)]
    return [f"{where}{text}" for text in found]


def _names(spec: Spec) -> Iterator[str]:
    if spec.name != spec.path.stem:
        yield f": name is '{spec.name}' but the file is {spec.path.name}; make them equal"
    if spec.speed not in SPEEDS:
        yield f": speed is '{spec.speed}'; choose one of {', '.join(SPEEDS)}"
    if type(spec.max_deferred) is not int or spec.max_deferred < 1:
        yield f": max_deferred must be a positive integer, not {spec.max_deferred!r}"
    for state in (spec.initial, *spec.final):
        if state not in spec.states:
            yield f": '{state}' (initial or final) isn't a state; states: {', '.join(spec.states)}"
    for state, event in sorted(spec.never):
        if state not in spec.states or event not in spec.events:
            yield f": never: '{event} in {state}' names an unknown state or event"
    yield from _state_names(spec)
    yield from _event_names(spec)
    yield from _invariant_names(spec)


def _state_names(spec: Spec) -> Iterator[str]:
    for state in spec.states.values():
        if state.must_leave and state.timeout is None:
            yield f": state {state.name} is must_leave and has no timeout; add one"
        if state.must_leave and state.name in spec.final:
            yield f": state {state.name} is final and must_leave; it can't be both"
        if state.timeout and state.timeout.event not in spec.events:
            yield f": timeout of state {state.name}: '{state.timeout.event}' isn't in [events]; declare it"
        if state.timeout and spec.speed == "array":
            yield f": state {state.name}: an array machine has no time-outs; its owner sends an event instead"


def _event_names(spec: Spec) -> Iterator[str]:
    messages = getattr(spec.core, "MESSAGES", None)
    timers = spec.timer_events()
    for event, say in spec.events.items():
        sender, colon, _ = say.partition(":")
        if not colon:
            yield f": event {event}: write 'SENDER: meaning', not '{say}'"
        elif event in timers:
            if sender != "timer":
                yield f": event {event} is a state's time-out; its text begins with 'timer:'"
        elif sender != "self" and not inspect.isclass(getattr(messages, event, None)):
            yield (
                f": event {event}: no such message struct; add it to the messages module, or begin its text "
                "with 'self:' where the owner itself fires it, or name it in a state's timeout"
            )


def _invariant_names(spec: Spec) -> Iterator[str]:
    ids = [invariant.id for invariant in spec.invariants]
    for invariant in spec.invariants:
        if ids.count(invariant.id) > 1:
            yield f": invariant {invariant.id} stands there more than once"
        if invariant.scope == "core":
            if not callable(getattr(spec.core, invariant.check, None)):
                yield f": invariant {invariant.id}: {spec.owner} has no method '{invariant.check}()'"
        elif invariant.scope == "system":
            if not callable(getattr(sys.modules[spec.core.__module__], invariant.check, None)):
                module = spec.owner.partition(":")[0]
                yield f": invariant {invariant.id}: {module} has no function '{invariant.check}(world)'"
        else:
            yield f": invariant {invariant.id}: scope is 'core' or 'system', not '{invariant.scope}'"


def _rows(spec: Spec) -> Iterator[str]:
    for row in spec.rows:
        for text in _row(spec, row):
            yield f":{row.line}: {row.label()}: {text}"


def _row(spec: Spec, row: Row) -> Iterator[str]:
    for state in row.states:
        if state not in spec.states:
            yield f"'{state}' isn't a state; states: {', '.join(spec.states)}"
    if not row.states or len(set(row.states)) != len(row.states):
        yield "`in` is empty or names a state twice"
    if row.event not in spec.events:
        yield f"'{row.event}' isn't in [events]; events: {', '.join(spec.events)}"
    if row.to is not None and row.to not in spec.states:
        yield f"`to`: '{row.to}' isn't a state; states: {', '.join(spec.states)}"
    for kind, name in [("guard", row.guard), *(("action", action) for action in row.actions)]:
        if name is not None:
            yield from _callable(spec, kind, name)
    if row.defer and row.ignore:
        yield "defer and ignore exclude each other"
    if row.defer or row.ignore:
        if row.actions or row.to is not None:
            yield "a deferred or ignored event does nothing and goes nowhere; drop `do` and `to`"
        if not row.why:
            yield "a deferred or ignored event needs a `why`"
    elif not row.actions and row.to is None:
        yield "it neither does nor goes; say `ignore = true` and why, if that is meant"
    if row.defer and spec.speed == "array":
        yield "an array machine can't defer; its owner keeps the message"
    if row.or_error and row.guard is None:
        yield '`else = "error"` belongs to a row with a guard'


def _callable(spec: Spec, kind: str, name: str) -> Iterator[str]:
    method = inspect.getattr_static(spec.core, name, None)
    if not inspect.isfunction(method):
        yield f"{kind} '{name}' isn't a method of {spec.owner}; write it there or correct the name"
        return
    if any(name in vars(base) for base in spec.core.__mro__ if vars(base).get("RESERVED")):
        yield f"{kind} '{name}' is the base class's own method; choose another name"
    if inspect.iscoroutinefunction(method):
        yield f"{kind} '{name}' is a coroutine; guards and actions never wait"
    arguments = "(self, msg)"
    if spec.speed == "array":
        arguments = "(self, slots, msg)" if kind == "guard" else "(self, slots, at, msg)"
    try:
        inspect.signature(method).bind(*arguments.split(","))
    except TypeError:
        yield f"{kind} '{name}' must take {arguments}"


def _pairs(spec: Spec) -> Iterator[str]:
    unanswered: list[str] = []
    timers = spec.timer_events()
    for event in spec.events:
        for state in spec.states.values():
            group = spec.group(state.name, event)
            pair = f"{event} in {state.name}"
            if event in timers and (state.timeout is None or state.timeout.event != event):
                # A time-out is dropped on leaving: here it can't fire, by construction.
                if group or (state.name, event) in spec.never:
                    yield f": {pair}: state {state.name} doesn't arm this time-out; drop its answer"
            elif not group:
                if (state.name, event) not in spec.never:
                    unanswered.append(pair)
            elif (state.name, event) in spec.never:
                yield f":{group[0].line}: {group[0].label()}: `never` says that this pair can't happen"
            else:
                yield from _group(pair, group)
    if unanswered:
        pairs = "\n  ".join(unanswered)
        yield f": {len(unanswered)} pairs are unanswered; give each a row or a line in `never`:\n  {pairs}"


def _group(pair: str, group: list[Row]) -> Iterator[str]:
    for row in group[:-1]:
        if row.guard is None:
            yield f":{row.line}: {row.label()}: has no guard, so later rows of '{pair}' are never tried"
        if row.or_error:
            yield f":{row.line}: {row.label()}: `else = \"error\"` must be in the last row of '{pair}'"
    last = group[-1]
    if last.guard is not None and not last.or_error:
        yield f":{last.line}: {last.label()}: '{pair}' must end without a guard, or in `else = \"error\"`"
    guards = [row.guard for row in group if row.guard]
    if len(set(guards)) != len(guards):
        yield f":{last.line}: {last.label()}: '{pair}' asks the same guard twice"


def _reach(spec: Spec) -> Iterator[str]:
    onward: dict[str, set[str]] = {state: set() for state in spec.states}
    back: dict[str, set[str]] = {state: set() for state in spec.states}
    for row in spec.rows:
        for state in row.states:
            if row.to is not None:
                onward[state].add(row.to)
                back[row.to].add(state)
    reached = _closure({spec.initial}, onward)
    for state in spec.states:
        if state not in reached:
            yield f": state {state} can't be reached from {spec.initial}; add a row to it or drop it"
    if not spec.final:
        yield ": final is empty; name the states in which the machine may stop for good"
    for final in spec.final:
        reaching = _closure({final}, back)
        for state in spec.states:
            if state not in reaching and state not in spec.final:
                yield f": final state {final} can't be reached from {state}; add a row that leads there"


def _closure(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    seen = set(start)
    todo = list(start)
    while todo:
        for state in edges[todo.pop()] - seen:
            seen.add(state)
            todo.append(state)
    return seen
