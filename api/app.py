"""The ASGI callable: routes, keys, ids, metrics, and errors that never end the process."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from api.chat import chat
from api.checks import rid_of
from api.completions import completions
from api.errors import NoRoute, Unauthorized, WrongMethod, status_of
from api.exchange import ClientGone, Exchange, Receive, Scope, Send
from api.gate import gate_of
from api.generate import generate
from api.handle import Engine
from api.openapi import document
from api.probes import PROBES, Health, ProbeRoutes
from api.run import Service
from api.served import Served
from engine.config import Settings
from engine.errors import BadRequest, EngineError, UnknownModel
from engine.fine_clock import fine_s
from engine.grammar.gate import GatePolicy
from engine.metrics import Metrics

LOG = logging.getLogger("api")
Handler = Callable[[Service, Exchange], Awaitable[None]]
CLIENT_LEFT = 499
"""Status in metrics of answers that nobody waited for."""

POSTS: dict[str, Handler] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/generate": generate,
}
GETS = (
    "/v1/models",
    "/v1/models/{id}",
    *PROBES,
    "/metrics",
    "/openapi.json",
)
OPEN_TO_ALL = frozenset({*PROBES, "/metrics"})
"""Answered without a key: probes and scrapers have none."""

ENDPOINTS = (*POSTS, *GETS)
OTHER = "other"
"""Endpoint label of unknown paths, which are a client's text and thus no label."""


def create_app(
    engine: Engine,
    served: Served,
    metrics: Metrics,
    health: Health,
    settings: Settings,
    *,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    fresh_id: Callable[[str], str] = lambda prefix: prefix + secrets.token_hex(12),
    wall_s: Callable[[], float] = time.time,
) -> App:
    """The server's ASGI callable. The last three are given by tests that want the same run twice."""
    gate = gate_of(GatePolicy(whitespace=settings.whitespace), served.encoding, served.tokenizer)
    return App(Service(engine, served, metrics, draw_seed, fresh_id, wall_s, gate), health, settings)


class App:
    """ASGI 3 callable; use `create_app`."""

    def __init__(self, service: Service, health: Health, settings: Settings) -> None:
        self._service = service
        self._key = settings.api_key.encode()
        self._max_body_bytes = settings.max_body_bytes
        self._gets: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/models": self._models,
            "/v1/models/{id}": self._model,
            **ProbeRoutes(service.engine, health, settings.dp_size).routes,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection event of the server."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(Exchange(scope, receive, send, self._max_body_bytes))
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, exchange: Exchange) -> None:
        endpoint = endpoint_of(exchange.path)
        metrics = self._service.metrics
        metrics.request(endpoint)
        status = CLIENT_LEFT
        try:
            await self._answer(endpoint, exchange)
            status = exchange.status
        except ClientGone:
            pass
        except Exception as error:
            if not isinstance(error, EngineError):
                LOG.exception("%s %s failed", exchange.method, endpoint, extra=of_request(exchange))
            status = exchange.status or status_of(error)
            # After the first byte the handler has told the client already.
            if not exchange.status:
                exchange.rid = exchange.rid or echoed_rid(exchange) or self._service.fresh_id("req-")
                await exchange.fail(error)
        finally:
            metrics.response(endpoint, status)
            spent_s = fine_s() - exchange.began_s
            told = (exchange.method, endpoint, status, spent_s)
            LOG.debug("%s %s: %d after %.3f s", *told, extra=of_request(exchange))

    async def _answer(self, endpoint: str, exchange: Exchange) -> None:
        if endpoint == OTHER:
            raise NoRoute(f"there is no {exchange.path[:100]!r} here")
        if endpoint not in OPEN_TO_ALL:
            self._authorise(exchange)
        allowed = "POST" if endpoint in POSTS else "GET"
        if exchange.method != allowed and (exchange.method, allowed) != ("HEAD", "GET"):
            raise WrongMethod(f"{endpoint} takes {allowed}, not {exchange.method[:20]}", allowed)
        if endpoint in POSTS:
            await POSTS[endpoint](self._service, exchange)
        else:
            await self._gets[endpoint](exchange)

    def _authorise(self, exchange: Exchange) -> None:
        if not self._key:
            return
        scheme, _, token = (exchange.header("authorization") or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._key):
            raise Unauthorized("a valid API key is needed: Authorization: Bearer KEY")

    async def _models(self, exchange: Exchange) -> None:
        await exchange.answer_json({"object": "list", "data": [self._card()]})

    async def _model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix("/v1/models/")
        if name != self._service.served.name:
            raise UnknownModel(f"The model `{name[:100]}` does not exist")
        await exchange.answer_json(self._card())

    def _card(self) -> dict[str, Any]:
        served = self._service.served
        return {
            "id": served.name,
            "object": "model",
            "created": served.created,
            "owned_by": "engine",
            "root": served.name,
            "parent": None,
            "max_model_len": served.bounds.context_length,
        }

    async def _metrics(self, exchange: Exchange) -> None:
        kind = b"text/plain; version=0.0.4; charset=utf-8"
        await exchange.answer(200, self._service.metrics.exposition(), kind)

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer_json(document(self._service.served.name))


def of_request(exchange: Exchange) -> dict[str, str]:
    """What a log line shows of the request."""
    return {"request_id": exchange.rid} if exchange.rid else {}


def echoed_rid(exchange: Exchange) -> str:
    """The client's id, for refusals that come before the body is read; empty for none."""
    try:
        return rid_of("x-request-id", exchange.header("x-request-id"))
    except BadRequest:
        return ""


def endpoint_of(path: str) -> str:
    """The route's pattern, `other` where there is none."""
    if path in ENDPOINTS:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") and len(path) > 11 else OTHER


async def _lifespan(receive: Receive, send: Send) -> None:
    """The launcher starts and ends the engine; here is nothing to do."""
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
