"""/health: whether the server answers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.replies import json_reply


async def health(_request: Request) -> Response:
    """Say that the model is loaded: the server listens from then on."""
    return json_reply({"status": "ok"})
