"""Engine errors as HTTP: status, headers and the OpenAI error object."""

from __future__ import annotations

from typing import Any

import orjson

from engine.errors import BadRequest, EngineError, NotServing, QueueFull, UnknownModel
from engine.messages import Delta

RETRY_AFTER_S = 1
"""What 408, 429 and 503 answers tell clients to wait."""


class Unauthorized(EngineError):
    """The bearer token is missing or wrong."""

    http_status = 401
    kind = "authentication_error"


class NoRoute(EngineError):
    """No such path, or not with this method."""

    http_status = 404
    kind = "not_found_error"


class WrongMethod(EngineError):
    """The path exists, but not with this method. `allowed` are the methods that it has."""

    http_status = 405
    kind = "invalid_request_error"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestEnded(EngineError):
    """A request that was accepted ended with an error; status and message are those of its terminal event."""

    def __init__(self, delta: Delta) -> None:
        super().__init__(delta.message)
        self.http_status = delta.status
        client_fault = "invalid_request_error" if 400 <= delta.status < 500 else EngineError.kind
        self.kind = {429: QueueFull.kind, 503: NotServing.kind}.get(delta.status, client_fault)


def error_object(error: Exception) -> dict[str, Any]:
    """The value of `error` in a body or an event. A fault of ours shows its class, not its text."""
    param = code = None
    if isinstance(error, BadRequest):
        param, code = error.param, error.code
    elif isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    if not isinstance(error, EngineError):
        return {
            "message": f"internal error: {type(error).__name__}",
            "type": EngineError.kind,
            "param": None,
            "code": None,
        }
    if code is None and str(error).startswith("slow_client"):
        code = "slow_client"
    return {"message": str(error), "type": error.kind, "param": param, "code": code}


def error_body(error: Exception) -> bytes:
    """The whole body. `object` and the flat keys are there for clients of the older shape."""
    shown = error_object(error)
    return orjson.dumps({"error": {**shown, "object": "error"}})


def status_of(error: Exception) -> int:
    """HTTP status."""
    return error.http_status if isinstance(error, EngineError) else EngineError.http_status


def headers_of(error: Exception) -> list[tuple[bytes, bytes]]:
    """Headers that belong to the status."""
    status = status_of(error)
    if status in (408, 429, 503):
        return [(b"retry-after", str(RETRY_AFTER_S).encode())]
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, WrongMethod):
        return [(b"allow", error.allowed.encode())]
    return []
