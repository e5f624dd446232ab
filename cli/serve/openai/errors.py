"""OpenAI's error object: message, type, the field and a code."""

from __future__ import annotations

from typing import Any

from specrun.cli.serve.errors import RequestError


def error_object(error: RequestError) -> dict[str, Any]:
    """Return {"error": {...}}."""
    inner = {
        "message": str(error),
        "type": error.kind,
        "param": error.param,
        "code": error.code,
    }
    return {"error": inner}
