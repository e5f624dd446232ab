"""Anthropic's error object: a type and a message, which names the field."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from specrun.cli.serve.errors import RequestError

_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def error_object(error: RequestError) -> dict[str, Any]:
    """Return {"type": "error", "error": {...}}."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(error.status, usual)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
