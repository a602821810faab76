"""What the server takes and answers, as an OpenAPI document: the requests' models, in the form tools read."""

from __future__ import annotations

from typing import Any

from tercet import __version__
from tercet.inference.protocol import ChatRequest, CompletionRequest

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
_ERRORS = {
    "400": "what is wrong with the request, the field and the value seen",
    "401": "a key is needed",
    "403": "a page of another site",
    "404": "no such model or address",
    "405": "another method is needed",
    "413": "the request is too long",
    "429": "more requests wait than are taken",
    "500": "the server failed",
}


def description() -> dict[str, Any]:
    """Return the document. Answers are OpenAI's objects; their inside is left open here."""
    schemas: dict[str, Any] = {"Error": _ERROR, "Answer": {"type": "object"}}
    for kind in (ChatRequest, CompletionRequest):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[kind.__name__] = schema
    one = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tercet", "version": __version__},
        "paths": {
            "/health": {"get": _operation("Whether it answers, and how much goes on")},
            "/metrics": {"get": _operation("Counts since the start", "text/plain")},
            "/v1/models": {"get": _operation("The one model that is served")},
            "/v1/models/{name}": {"get": {**_operation("The model of this name"), "parameters": [one]}},
            "/v1/chat/completions": {"post": _operation("The next message of a chat", request=ChatRequest.__name__)},
            "/v1/completions": {"post": _operation("How a text goes on", request=CompletionRequest.__name__)},
        },
        "components": {"schemas": schemas},
    }


def _operation(summary: str, kind: str = "application/json", request: str | None = None) -> dict[str, Any]:
    def content(name: str, kind: str = "application/json") -> dict[str, Any]:
        return {kind: {"schema": {"$ref": f"#/components/schemas/{name}"}}}

    answer = content("Answer") if kind == "application/json" else {kind: {"schema": {"type": "string"}}}
    if request is not None:
        answer |= {"text/event-stream": {"schema": {"type": "string"}}}
    found: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": answer},
            **{code: {"description": text, "content": content("Error")} for code, text in _ERRORS.items()},
        },
    }
    if request is not None:
        found["requestBody"] = {"required": True, "content": content(request)}
    return found
