"""The server's application: which path is answered by what, and what every request goes through."""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from specrun.bindings.errors import SpecrunError
from specrun.cli.serve.anthropic import messages
from specrun.cli.serve.errors import RequestError, request_error
from specrun.cli.serve.http.guard import Access, Guard, cors
from specrun.cli.serve.infill import infill
from specrun.cli.serve.native import metrics, properties, tokens
from specrun.cli.serve.openai import chat, completions, models
from specrun.cli.serve.page import page_routes
from specrun.cli.serve.replies import failure
from specrun.cli.serve.responses import responses
from specrun.cli.serve.service import AnswerService
from specrun.cli.serve.settings import ServeSettings
from specrun.runtime.engine import Engine

_log = logging.getLogger(__name__)


def create_app(engine: Engine, settings: ServeSettings) -> Starlette:
    """Return the application that answers with an engine, which the caller closes afterwards."""
    service = AnswerService(engine, settings)
    counts = metrics.Metrics(service)

    app = Starlette(
        routes=routes(),
        middleware=[
            Middleware(Access, metrics=counts),
            Middleware(Guard, settings=settings),
            *cors(settings),
        ],
        exception_handlers={
            SpecrunError: _failed,
            HTTPException: _not_found,
            Exception: _failed,
        },
    )
    app.state.service = service
    app.state.metrics = counts
    app.state.started = int(time.time())
    return app


def routes() -> list[BaseRoute]:
    """Return the table of paths."""
    return [
        *page_routes(),
        *_both("/health", properties.health, "GET"),
        Route("/props", properties.props, methods=["GET"]),
        Route("/slots", properties.slots, methods=["GET"]),
        Route("/metrics", metrics.metrics, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/apply-template", tokens.apply_template, methods=["POST"]),
        *_both("/models", models.list_models, "GET"),
        *_both("/models/{name:path}", models.get_model, "GET"),
        *_both("/chat/completions", chat.chat_completions, "POST"),
        *_both("/completions", completions.completions, "POST"),
        Route("/infill", infill, methods=["POST"]),
        *_both("/responses", responses.responses, "POST"),
        *_both("/responses/input_tokens", responses.input_tokens, "POST"),
        *_both("/messages", messages.messages, "POST"),
        *_both("/messages/count_tokens", messages.count_tokens, "POST"),
        *_both("/embeddings", models.embeddings, "POST"),
    ]


def _both(path: str, endpoint: object, method: str) -> list[BaseRoute]:
    """Return the routes of a path, with and without /v1, as llama-server has them."""
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]  # type: ignore[arg-type]


async def _failed(request: Request, problem: Exception) -> Response:
    error = request_error(problem)
    if isinstance(problem, SpecrunError) and error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("a request failed: %s", problem)
    return failure(request.url.path, error)


async def _not_found(request: Request, problem: Exception) -> Response:
    """Answer what no route takes."""
    assert isinstance(problem, HTTPException)
    path, status = request.url.path, problem.status_code
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (problem.headers or {}).get("Allow", "")
        message = f"{path} does not take {request.method}: use {allowed.replace('HEAD, ', '')}"
    else:
        message = f"there is no {path} here: docs/server.md lists the paths"
    return failure(path, RequestError(message, status=status))
