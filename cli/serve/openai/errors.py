"""OpenAI's error object: message, type, the field and a code."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from specrun.cli.serve.errors import RequestError
from specrun.cli.serve.replies import json_reply


def error_object(error: RequestError) -> dict[str, Any]:
    """Return {"error": {...}}."""
    inner = {
        "message": str(error),
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return {"error": inner}


def error_reply(error: RequestError) -> Response:
    """Return the reply to a request that is not answered."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_reply(error_object(error), error.status, **headers)
