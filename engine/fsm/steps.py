"""What may happen next in a searched system, and what it leads to.

A state of the system is (snapshot numbers, channels, workload sent, time-outs fired).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from engine.fsm.brief import brief
from engine.fsm.search import Search
from engine.fsm.world import Processes, Reaction, World

OUTSIDE = -1  # Sender index of the workload in moves.
Channels = dict[tuple[int, int], tuple[int, ...]]


class State(NamedTuple):
    """snaps: one a process; channels: ((sender, receiver), messages) of channels that aren't empty, sorted;
    sent: workload items sent, a bit each; fired: time-outs so far (0 where unbounded)."""

    snaps: tuple[int, ...]
    channels: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    sent: int
    fired: int


class Move(NamedTuple):
    """One step of a run; it may also never happen if `optional`.

    kind  arrive (from a channel in a mailbox), deliver (to the core), send (from outside), choose, time-out
    """

    kind: str
    sender: int
    receiver: int
    what: Any
    optional: bool = False


class Steps:
    """The moves of one search."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.processes = Processes(search)
        self.start = State(self.processes.start, (), 0, 0)
        self._local = {self.processes.index[name] for name in search.local}
        self._mailbox = self.processes.senders.number("mailbox")
        self._lane = self.processes.senders.number("priority lane")
        self._in_order = search.order == "pair"
        names, number = self.processes.index, self.processes.messages.number
        self._work = [(names[item.to], number(item.message), item) for item in search.workload]
        self._before = [self._must_precede(i) for i in range(len(self._work))]
        self._choices: dict[int, list[Move]] = {}

    def _must_precede(self, item: int) -> int:
        """Bits of the workload items that come before this one: all earlier of its pair, or its equals."""
        to, message, this = self._work[item]
        bits = 0
        for i, (other_to, other_message, other) in enumerate(self._work[:item]):
            same_pair = other_to == to and other.sender == this.sender
            if same_pair and (self._in_order or other_message == message):
                bits |= 1 << i
        return bits

    def moves(self, state: State) -> list[Move]:
        """Everything that may happen next."""
        moves = list(self._deliveries(state))
        moves += self._sends(state)
        environment = self.processes.environment
        if environment is not None:
            moves += self._environment(state.snaps[environment])
        timeouts = self.search.timeouts
        due = timeouts == "any" or (timeouts == "quiet" and all(move.optional for move in moves))
        if due and not self.spent(state):
            moves += self._time_outs(state)
        return moves

    def spent(self, state: State) -> bool:
        """True where the bound on time-outs keeps one from firing."""
        return self.search.timeout_limit is not None and state.fired >= self.search.timeout_limit

    def _deliveries(self, state: State) -> Iterator[Move]:
        inside = (self._mailbox, self._lane)
        hurried = {receiver for (sender, receiver), _ in state.channels if sender == self._lane}
        for (sender, receiver), messages in state.channels:
            if sender == self._mailbox and receiver in hurried:
                continue
            kind = "arrive" if receiver in self._local and sender not in inside else "deliver"
            for message in messages[:1] if self._in_order or sender in inside else dict.fromkeys(messages):
                yield Move(kind, sender, receiver, message)

    def _sends(self, state: State) -> Iterator[Move]:
        for i, (to, _, item) in enumerate(self._work):
            if state.sent >> i & 1 or self._before[i] & ~state.sent:
                continue
            if item.after is not None:
                core, states = item.after
                watched = self.processes.index[core]
                if self.processes.live(watched, state.snaps[watched]).state not in states:
                    continue
            yield Move("send", OUTSIDE, to, i, item.optional)

    def _environment(self, snap: int) -> list[Move]:
        if snap not in self._choices:
            index = len(self.processes.names)
            live = self.processes.live(index, snap)
            certain = [Move("choose", index, index, choice) for choice in live.choices()]
            self._choices[snap] = certain + [
                Move("choose", index, index, choice, True) for choice in live.faults()
            ]
        return self._choices[snap]

    def _time_outs(self, state: State) -> Iterator[Move]:
        for core, live in enumerate(self.cores(state)):
            if live.armed is not None:
                # A state that needn't be left may be the last one of a run although its timer goes on.
                yield Move("time-out", core, core, None, not live.spec.states[live.state].must_leave)

    def cores(self, state: State) -> list[Any]:
        """The cores as they are in this state, to be read only."""
        return [self.processes.live(i, state.snaps[i]) for i in range(len(self.processes.names))]

    def take(self, state: State, move: Move) -> tuple[State, str | None]:
        """The state after a move, and what went wrong in it."""
        snaps = list(state.snaps)
        channels: Channels = dict(state.channels)
        sent, fired = state.sent, state.fired
        message = move.what
        if move.kind in ("deliver", "arrive"):
            messages = list(channels.pop((move.sender, move.receiver)))
            messages.remove(message)
            if messages:
                channels[move.sender, move.receiver] = tuple(messages)
        elif move.kind == "send":
            sent |= 1 << message
            message = self._work[message][1]
        if self._queues(move):
            self._put(channels, None, move.receiver, message)
            return State(state.snaps, tuple(sorted(channels.items())), sent, fired), None
        if move.kind in ("deliver", "send"):
            reaction = self.processes.receive(move.receiver, snaps[move.receiver], message)
        elif move.kind == "choose":
            reaction = self.processes.choose(snaps[move.receiver], move.what)
        else:
            fired += self.search.timeout_limit is not None
            reaction = self.processes.time_out(move.receiver, snaps[move.receiver])
        fault = self._apply(move.receiver, reaction, snaps, channels)
        return State(tuple(snaps), tuple(sorted(channels.items())), sent, fired), fault

    def _apply(
        self,
        process: int,
        reaction: Reaction,
        snaps: list[int],
        channels: Channels,
    ) -> str | None:
        snaps[process] = reaction.snap
        for sender, to, message in reaction.sends:
            in_process = sender in self._local and to in self._local
            self._put(channels, None if in_process else sender, to, message)
        fault = reaction.fault
        environment = self.processes.environment
        if environment is not None and process != environment:
            for effect in reaction.outs:
                answer = self.processes.observe(snaps[environment], process, effect)
                fault = self._apply(environment, answer, snaps, channels) or fault
        return fault

    def _queues(self, move: Move) -> bool:
        """True for a message that waits its turn in a mailbox."""
        return move.kind == "arrive" or (move.kind == "send" and move.receiver in self._local)

    def _put(self, channels: Channels, sender: int | None, to: int, message: int) -> None:
        """Into the channel of this sender, or, where that is None, into the mailbox."""
        ordered = self._in_order or sender is None
        if sender is None:
            kind = type(self.processes.messages.values[message]).__name__
            sender = self._lane if kind in self.search.urgent else self._mailbox
        waiting = (*channels.get((sender, to), ()), message)
        channels[sender, to] = waiting if ordered else tuple(sorted(waiting))

    def world(self, state: State) -> World:
        """The state as invariants see it."""
        environment = self.processes.environment
        rest = None if environment is None else self.processes.live(environment, state.snaps[environment])
        cores = dict(zip(self.processes.names, self.cores(state), strict=True))
        return World(cores, rest, partial(self._in_flight, state))

    def _in_flight(self, state: State) -> list[tuple[str, str, Any]]:
        names, messages = self.processes.senders.values, self.processes.messages.values
        return [(names[a], names[b], messages[m]) for (a, b), waiting in state.channels for m in waiting]

    def show(self, state: State, move: Move) -> str:
        """One line of a run: who, what, and how the receiving core's state changes."""
        names = self.processes.senders.values
        who = names[move.receiver]
        if move.kind == "choose":
            return f"{who}: {move.what}"
        if move.kind == "time-out":
            line = f"{who}: time-out"
        elif move.kind == "send":
            line = f"{self._work[move.what][2].sender} -> {who}: {brief(self._work[move.what][2].message)}"
        else:
            line = f"{names[move.sender]} -> {who}: {brief(self.processes.messages.values[move.what])}"
        if self._queues(move):
            return f"{line}   (in the mailbox)"
        before = self.processes.live(move.receiver, state.snaps[move.receiver]).state
        after, fault = self.take(state, move)
        there = self.processes.live(move.receiver, after.snaps[move.receiver]).state
        change = "" if fault else f"   [{before}]" if there == before else f"   [{before} -> {there}]"
        return line + change
