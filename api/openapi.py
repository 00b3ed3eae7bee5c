"""The OpenAPI document, made from the body structs, so that it can't say what the code doesn't read."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from api.schema import ChatBody, CompletionBody, GenerateBody
from engine.model.chat_messages import ROLES

_JSON = "application/json"
_POSTS = (
    ("/v1/chat/completions", ChatBody, "A chat completion; with stream an event stream of chunks."),
    ("/v1/completions", CompletionBody, "Text completions; with stream an event stream of chunks."),
    ("/generate", GenerateBody, "Native generation from text or token ids, single or batch."),
)
_GETS = (
    ("/v1/models", "The served models."),
    ("/health", "200 until the server goes down."),
    ("/health_generate", "200 once every rank has made a token; 503 after 20 s without."),
    ("/ready", "200 while requests are taken."),
    ("/openapi.json", "This document."),
)
_REFUSALS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "404": "Unknown model or path.",
    "405": "Another method is needed.",
    "408": "A grammar was not compiled in time; Retry-After says when to come back.",
    "413": "The body is too long.",
    "429": "The queue is full; Retry-After says when to come back.",
    "500": "A fault of the server.",
    "503": "Starting, draining or no live rank; Retry-After says when to come back.",
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": ["string", "null"]},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
}
"""A chat message; its checks stand in engine/model/chat_messages.py."""


@cache
def document(model: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document; `model` is the example's model name."""
    bodies = [body for _, body, _ in _POSTS]
    schemas, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    messages = components["ChatBody"]["properties"]["messages"]
    messages |= {"items": _MESSAGE, "minItems": 1}
    paths: dict[str, Any] = {}
    for (path, _, say), schema in zip(_POSTS, schemas, strict=True):
        paths[path] = {"post": _operation(say, {_JSON: {}, "text/event-stream": {}}, schema)}
    for path, say in _GETS:
        paths[path] = {"get": _operation(say, {_JSON: {}})}
    paths["/health_scheduler"] = {"get": _operation("200 with a fresh snapshot of every rank.", {_JSON: {}})}
    paths["/health_scheduler"]["get"]["responses"]["503"] = {
        "description": "A rank is missing or silent; the body says which.",
        "content": {_JSON: {}},
    }
    paths["/metrics"] = {"get": _operation("Prometheus' text format.", {"text/plain": {}})}
    paths["/v1/models/{id}"] = {"get": _model_operation(model)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "DeepSeek-V4 serving engine", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(say: str, content: dict[str, Any], body: Any = None) -> dict[str, Any]:
    error = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {"200": {"description": say, "content": content}}
    for status, why in _REFUSALS.items():
        responses[status] = {"description": why, "content": error}
    operation: dict[str, Any] = {"summary": say, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return operation


def _model_operation(model: str) -> dict[str, Any]:
    name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "example": model}
    return {**_operation("One served model.", {_JSON: {}}), "parameters": [name]}
