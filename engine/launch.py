"""`serve`: the server's process, from its bound socket to its exit code.

The listening socket is bound before anything is loaded. The order of an end is decided by the shutdown
coordinator; the launcher tells it what happens and does what it says.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from api.app import ENDPOINTS, App, create_app
from api.handle import Engine
from api.served import Served, load_served
from engine.actors.health import Health
from engine.actors.process import Process, log_to_stderr, report_to_stderr
from engine.actors.shutdown import Shutdown
from engine.actors.wiring import wiring
from engine.board import LoadBoard
from engine.config import Settings
from engine.errors import ActorFailed, EngineError
from engine.front import say_when_compiling, start_front, start_grammars
from engine.grammar.service import GrammarService
from engine.http_server import HttpServer, bind
from engine.lifecycle_box import report
from engine.lifecycle_launcher import CLEAN, FAILED, REFUSED, Launcher
from engine.lifecycle_pulse import PulseBoard
from engine.messages import Snapshot
from engine.metrics import Metrics
from engine.metrics_process import PAUSES
from engine.probes import Probes

RANK_COMMAND = (sys.executable, "-m", "engine", "rank", "--fd")
"""Starts a rank's process; the link's descriptor comes last."""

STOP_S = 15.0
"""How long ranks may take to end once they are told; longer than what a rank gives its own parts."""

__all__ = ["CLEAN", "FAILED", "REFUSED", "Launcher", "serve", "start_api"]


def serve(settings: Settings, command: Sequence[str] = RANK_COMMAND) -> int:
    """Serves until a signal or a failure; returns the exit code.

    command  what starts a rank's process
    """
    log_to_stderr(settings.log_level, settings.log_format)
    PAUSES.watch()
    try:
        sock = bind(settings)
    except EngineError as error:
        report_to_stderr(f"api: {error}")
        return REFUSED
    with sock:
        return anyio.run(
            _main, settings, sock, command, backend="asyncio", backend_options={"use_uvloop": True}
        )


async def _main(settings: Settings, sock: socket.socket, command: Sequence[str]) -> int:
    board = LoadBoard.create(settings.dp_size) if settings.dp_size > 1 else -1
    url = f"http://{settings.host}:{sock.getsockname()[1]}"
    launcher = Launcher(settings, command, url, board, PulseBoard.create(settings.dp_size))
    async with anyio.create_task_group() as http:
        try:
            async with anyio.create_task_group() as tasks:
                process = Process("api", wiring(), tasks, report_to_stderr)
                served = load_served(settings, int(time.time()))
                grammars = start_grammars(process, settings, served)
                process.spawn(say_when_compiling, process, grammars)
                engine, app = start_api(
                    process, settings, served, board=board, grammars=grammars, launcher=launcher
                )
                launcher.join(process, tasks, engine, HttpServer(app, "warning"))
                http.start_soon(launcher.serve, sock)
                await launcher.run()
                tasks.cancel_scope.cancel()
        except* Exception as group:
            report("api", group)
            launcher.fail(ActorFailed("the server has failed"))
        finally:
            await launcher.end_children()
    return launcher.exit_code


def start_api(
    process: Process,
    settings: Settings,
    served: Served,
    wall_s: Callable[[], float] = time.time,
    board: int = -1,
    grammars: GrammarService | None = None,
    launcher: Launcher | None = None,
    **given: Any,
) -> tuple[Engine, App]:
    """Starts the actors of the api process; returns the front's handle and the HTTP application over it.

    board     descriptor of the file of loads, -1 where ranks publish none
    grammars  compiles what constrained requests need; None: such requests are refused
    launcher  of processes; None: ranks show their life by messages alone
    given     further arguments of `create_app`
    """
    ranks, drain_ms, stop_ms = settings.dp_size, settings.drain_s * 1000, STOP_S * 1000
    process.start("health", lambda: Health(ranks, settings.snapshot_s))
    process.start("shutdown", lambda: Shutdown(ranks, drain_ms, stop_ms))
    metrics = _metrics(settings, served, grammars)
    health = process.mailbox("health")

    def on_snapshot(msg: Snapshot) -> None:
        metrics.snapshot(msg)
        health.tell(msg)

    loads = LoadBoard(board, ranks).read_all if board >= 0 else tuple
    engine = start_front(process, settings, served, on_snapshot, loads, grammars)
    probes = Probes(process.asks, health, wall_s)
    if launcher is not None:
        probes = Probes(process.asks, health, wall_s, launcher.beats, launcher.pids)
        metrics.registry.register(launcher.phases)
    return engine, create_app(engine, served, metrics, probes, settings, wall_s=wall_s, **given)


def _metrics(settings: Settings, served: Served, grammars: GrammarService | None) -> Metrics:
    metrics = Metrics(
        settings.metrics_prefix,
        served.name,
        settings.dp_size,
        served.bounds.context_length,
        ENDPOINTS,
        settings.load_balance_method,
        native=settings.dp_exchange == "native",
        vllm=settings.enable_vllm_metrics,
    )
    metrics.grammars.service = grammars
    return metrics
