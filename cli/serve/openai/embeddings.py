"""Embeddings: /v1/embeddings, which no model here makes yet."""

from __future__ import annotations

from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from specrun.cli.serve.errors import RequestError


async def embeddings(_request: Request) -> Response:
    """Say that a model that writes texts is served, and no model of embeddings."""
    problem = "this server's model writes texts and makes no embeddings: serve an embedding model"
    raise RequestError(f"{problem} with another program", status=HTTPStatus.NOT_IMPLEMENTED)
