"""Errors of requests: a sentence, the field it is about, and the status of the reply.

Errors of specrun have a status by their class; each API writes them in its own form.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from specrun.bindings.errors import (
    ClosedError,
    ContextFullError,
    OptionError,
    OutOfMemoryError,
    SpecrunError,
    TemplateError,
)

_CODES = {
    HTTPStatus.UNAUTHORIZED: "invalid_api_key",
    HTTPStatus.NOT_FOUND: "not_found",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded",
    HTTPStatus.NOT_IMPLEMENTED: "not_supported",
}


class RequestError(SpecrunError):
    """The reason that a request is refused: `param` is the field, `retry_after` is in seconds."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = HTTPStatus(status)
        self.code = code or _CODES.get(self.status)
        self.retry_after = retry_after


def request_error(problem: BaseException) -> RequestError:
    """Return the error that a client gets; a defect of specrun is only named by its class."""
    if isinstance(problem, RequestError):
        return problem
    message = str(problem)
    if isinstance(problem, ContextFullError):
        return RequestError(message, code="context_length_exceeded")
    if isinstance(problem, OptionError | TemplateError):
        return RequestError(message, field_named_in(message))
    if isinstance(problem, ClosedError):
        status = HTTPStatus.SERVICE_UNAVAILABLE
        return RequestError("the server is shutting down", status=status, retry_after=5)
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    if isinstance(problem, OutOfMemoryError | MemoryError):
        return RequestError(message or "out of memory", status=status, code="out_of_memory")
    if isinstance(problem, SpecrunError):
        return RequestError(message, status=status)
    name = type(problem).__name__
    return RequestError(f"{name}: this is a mistake in specrun; its log shows more", status=status)


def field_named_in(message: str) -> str | None:
    """Return the field that a message begins with, as in "top_p is 2: it must be ..."."""
    name, _, rest = message.partition(" ")
    is_name = rest.startswith("is ") and name != "there"
    return name if is_name and name.replace(".", "_").isidentifier() else None


_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
}
_OPENAI_KINDS = {
    **_KINDS,
    HTTPStatus.NOT_IMPLEMENTED: "not_supported_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "unavailable_error",
}


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object: message, type, the field and a code."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = _OPENAI_KINDS.get(error.status, usual)
    message = str(error)
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


_ANTHROPIC_KINDS = {
    **_KINDS,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return Anthropic's error object: a type and a message, which names the field."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_KINDS.get(error.status, usual)
    # Clients of this API recognise the error by these words, and shorten the conversation.
    told = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{told}{error}"}}
