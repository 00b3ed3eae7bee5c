"""Children of one process: started in its task group, reported when they fail, restarted at most once.

A failed actor's askers hear of it, a listener gets `Failed`, and the flight recorder is printed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import anyio

from engine.actors.ask import Asks
from engine.actors.mailbox import Mailbox
from engine.actors.shell import Shell
from engine.errors import ActorFailed
from engine.messages import Failed

RECORDS_A_LINE = 4
MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Child:
    """One actor of a process.

    start     makes a shell with a fresh core on the same mailbox
    restart   `once`: a failure within `within_s` of the restart is final; `never`: each failure is
    """

    name: str
    mailbox: Mailbox
    start: Callable[[], Shell]
    restart: Literal["never", "once"] = "never"
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of an actor's end; `record` is its flight recorder, oldest first."""

    name: str
    state: str
    message: str
    error: Exception
    record: tuple[tuple[str, str, int], ...]

    def as_message(self) -> Failed:
        """For another actor."""
        return Failed(self.name, self.state, self.message, repr(self.error))

    def report(self) -> str:
        """For a person: cause, traceback, and the rows that led there."""
        lines = [f"actor {self.name} failed in state {self.state} on {self.message}: {self.error!r}"]
        lines += [line.rstrip() for line in traceback.format_exception(self.error)]
        return "\n".join([*lines, recorder_of(self.name, self.record)])


def recorder_of(name: str, record: Iterable[tuple[str, str, int]]) -> str:
    """An actor's flight recorder, for a person."""
    entries = [f"{state} {event} {row}" for state, event, row in record]
    lines = [f"flight recorder of {name}, oldest first (state event row):"]
    for at in range(0, len(entries), RECORDS_A_LINE):
        lines.append("  " + " | ".join(entries[at : at + RECORDS_A_LINE]))
    return "\n".join(lines)


class Supervisor:
    """Runs children.

    asks    of this process: the askers of a failed child get ActorFailed
    report  prints a failure; called once for each
    listen  is told of each failure, as a message
    """

    def __init__(self, asks: Asks, report: Callable[[str], None], listen: Callable[[Failed], None]) -> None:
        self._asks = asks
        self._report = report
        self._listen = listen

    async def keep(self, child: Child) -> str:
        """Runs one child until it stops of itself; returns its reason.

        raises  ActorFailed, with the child's error as its cause, where it may not be started again
        """
        restarted_at_s: float | None = None
        while True:
            shell = child.start()
            try:
                reason = await shell.run()
            except Exception as error:
                now_s = anyio.current_time()
                again = child.restart == "once" and (
                    restarted_at_s is None or now_s - restarted_at_s > child.within_s
                )
                self._note(shell, error, final=not again)
                if not again:
                    child.mailbox.close()
                    raise ActorFailed(f"actor {child.name} ended with {error!r}") from error
                restarted_at_s = now_s
            else:
                child.mailbox.close()
                return reason

    def _note(self, shell: Shell, error: Exception, final: bool) -> None:
        failure = Failure(
            name=shell.name,
            state=shell.core.state,
            message=_short(shell.message),
            error=error,
            record=tuple(shell.core.record),
        )
        self._report(failure.report())
        self._asks.fail(shell.name, ActorFailed(f"actor {shell.name} ended with {error!r}"), for_good=final)
        self._listen(failure.as_message())


def _short(msg: object) -> str:
    text = repr(msg)
    return text if len(text) <= MESSAGE_CHARS else text[:MESSAGE_CHARS] + "..."
