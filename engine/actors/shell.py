"""Runs one core: takes messages, lets the core decide, carries its effects out, arms its time-outs.

The core decides without waiting; only here may a message wait for room in another mailbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from engine.actors.ask import Asks
from engine.actors.core import Core, Effect, Reply, Run, Send, TimedOut
from engine.actors.links import Ref
from engine.actors.mailbox import Mailbox
from engine.actors.timers import Timer, Timers
from engine.errors import Undeclared


class Shell:
    """One actor.

    refs    actors by name, this process's and those behind links
    sends   (receiver, message type name) pairs that the system description allows this actor
    submit  takes the jobs of `Run` effects; None where the core has none
    receive the core's own, or what stands around it
    """

    def __init__(
        self,
        core: Core,
        mailbox: Mailbox,
        refs: Mapping[str, Ref],
        timers: Timers,
        asks: Asks,
        sends: Callable[[str, type], bool],
        submit: Callable[[Any], None] | None = None,
        receive: Callable[[Any], list[Effect]] | None = None,
    ) -> None:
        self.name = mailbox.name
        self.core = core
        self.mailbox = mailbox
        self.message: Any = None
        self._refs = refs
        self._timers = timers
        self._asks = asks
        self._sends = sends
        self._submit = submit
        self._receive = receive or core.receive
        self._timer: Timer | None = None
        self._entry = -1
        self._hand: deque[Any] = deque()
        self._ended: str | None = None

    async def run(self) -> str:
        """Until the core stops; returns its reason.

        raises  whatever the core raised. `message` then is the one in hand: it is not delivered again.
                Messages that were taken with it and not looked at are back in the mailbox.
        """
        try:
            self._arm()
            while self._ended is None:
                self._hand.extend(await self.mailbox.take())
                await self._work_off()
            return self._ended
        finally:
            self._disarm()
            # A time-out belongs to this core's entries; another core might take it for its own.
            left = (*self.mailbox.take_first(), *self._hand)
            self.mailbox.put_back(msg for msg in left if type(msg) is not TimedOut)
            self._hand.clear()

    async def _work_off(self) -> None:
        """Everything in hand, and between two messages whatever arrives in the priority lane."""
        hand, core, mailbox = self._hand, self.core, self.mailbox
        while hand and self._ended is None:
            self.message = hand.popleft()
            effects = self._receive(self.message)
            if core.entry != self._entry:
                self._arm()
            if effects:
                await self._carry_out(effects)
                hand.extendleft(reversed(mailbox.take_first()))
        self.message = None

    async def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if not self._sends(effect.to, type(effect.msg)):
                    kind = type(effect.msg).__name__
                    raise Undeclared(f"specs/system.toml doesn't let {self.name} send {kind} to {effect.to}")
                await self._refs[effect.to].offer(effect.msg)
            elif isinstance(effect, Reply):
                self._asks.reply(effect.slot, effect.value)
            elif isinstance(effect, Run):
                if self._submit is None:
                    raise Undeclared(f"{self.name} gives out a job, but has no thread to run it")
                self._submit(effect.job)
            else:
                self._ended = effect.reason

    def _arm(self) -> None:
        """The time-out of the state that was entered, in place of the one before."""
        self._disarm()
        self._entry = self.core.entry
        armed = self.core.armed
        if armed is not None:
            timed_out = TimedOut(armed.entry)
            self._timer = self._timers.after(
                armed.after_ms / 1000, lambda: self.mailbox.tell_first(timed_out)
            )

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None
