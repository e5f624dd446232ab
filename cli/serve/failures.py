"""Replies to requests that are not answered, in the form of the API that was asked."""

from __future__ import annotations

from starlette.responses import Response

from specrun.cli.serve.anthropic import errors as anthropic
from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.openai import errors as openai
from specrun.cli.serve.replies import json_reply

_ANTHROPIC = ("/v1/messages", "/messages")


def failure(path: str, error: RequestError) -> Response:
    """Return the reply to a request for a path that fails."""
    is_anthropic = path.startswith(_ANTHROPIC)
    payload = (anthropic if is_anthropic else openai).error_object(error)
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_reply(payload, error.status, **headers)
