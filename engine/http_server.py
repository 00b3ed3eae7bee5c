"""The HTTP server: a listening socket, bound before anything is loaded; uvicorn, uvloop, httptools."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from engine.config import Settings
from engine.errors import ConfigError

BACKLOG = 2048
LAST_ANSWERS_S = 5
"""What answers get to leave when the server stops: every request has ended by then."""

IDLE_S = 75
"""How long a connection may be idle: longer than clients keep theirs (common ones 5 or 15 s, proxies 60 s),
so that no request meets a connection that is being closed."""


def bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises ConfigError that says who is in the way.

    Clients that connect while the model loads are answered with 503, not refused.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        way_out = "; another --port is free to choose" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"can't listen on {settings.host}:{settings.port}: {error.strerror}{way_out}"
        ) from error
    sock.setblocking(False)
    return sock


class HttpServer(uvicorn.Server):
    """uvicorn, but signals are the launcher's."""

    def __init__(self, app: Any, log_level: str) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level=log_level,
            server_header=False,
            timeout_graceful_shutdown=LAST_ANSWERS_S,
            timeout_keep_alive=IDLE_S,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the process's signal handlers alone."""
        yield

    async def run_on(self, sock: socket.socket) -> None:
        """Serves until `should_exit` is set and the last answers have left."""
        await self.serve(sockets=[sock])
