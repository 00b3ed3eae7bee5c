"""A process in small: mailboxes, timers, a supervisor, and whatever echo actors a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from engine.actors.ask import Asks
from engine.actors.links import Ref
from engine.actors.mailbox import Full, Mailbox
from engine.actors.shell import Shell
from engine.actors.supervise import Child, Supervisor
from engine.actors.timers import Timers
from engine.messages import Failed


class Stage:
    """What the actors of one test share."""

    def __init__(self, echo: ModuleType, tasks: TaskGroup) -> None:
        self.echo = echo
        self.tasks = tasks
        self.timers = Timers()
        self.asks = Asks()
        self.refs: dict[str, Ref] = {}
        self.cores: dict[str, list[Any]] = {}
        self.reports: list[str] = []
        self.failed: list[Failed] = []
        self.submit: Callable[[Any], None] | None = None
        self.causes: list[BaseException] = []
        self.supervisor = Supervisor(self.asks, self.reports.append, self.failed.append)

    def start(self, name: str, size: int = 64, full: Full = "reject", **child: Any) -> Mailbox:
        """An echo actor, running under the supervisor."""
        box = Mailbox(name, size, full)
        self.refs[name] = box

        def shell() -> Shell:
            core = self.echo.Echo(anyio.current_time)
            self.cores.setdefault(name, []).append(core)
            return Shell(
                core, box, self.refs, self.timers, self.asks, lambda to, kind: to != "secret", self.submit
            )

        self.tasks.start_soon(self.supervisor.keep, Child(name, box, shell, **child))
        return box

    def heard(self, name: str) -> list[tuple[Any, float]]:
        """What the newest core of this name has heard."""
        return list(self.cores[name][-1].heard)


@asynccontextmanager
async def stage_of(echo: ModuleType) -> AsyncIterator[Stage]:
    """A stage whose timers run; leaving it ends everything."""
    async with anyio.create_task_group() as tasks:
        stage = Stage(echo, tasks)
        tasks.start_soon(stage.timers.run)
        yield stage
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def failing_stage(echo: ModuleType) -> AsyncIterator[Stage]:
    """A stage that an actor's failure must end within a second; `causes` then has the errors that left it."""
    stage: Stage | None = None
    try:
        async with stage_of(echo) as stage:
            yield stage
            await anyio.sleep(1)
    except BaseExceptionGroup as group:
        assert stage is not None
        stage.causes = leaves(group)
    else:
        raise AssertionError("no actor's failure ended the stage")


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group, its groups opened."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
