"""The server's application: the table of paths, and the guard and the log of all requests."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Sequence
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrun.bindings.errors import SpecrunError
from specrun.cli.serve import figures
from specrun.cli.serve.apis import (
    anthropic,
    chat,
    completions,
    ollama,
    properties,
    responses,
    tokens,
)
from specrun.cli.serve.errors import RequestError, request_error
from specrun.cli.serve.figures import Metrics
from specrun.cli.serve.models import Models
from specrun.cli.serve.page import page_routes
from specrun.cli.serve.page.routes import PREFIX
from specrun.cli.serve.replies import failure
from specrun.cli.serve.settings import ServeSettings, host_name, is_loopback
from specrun.runtime.engine import Engine

# -- Middleware: the guard of all requests (Host, Origin, key), their count and their log ----------
#
# A page of the web that a browser shows may send requests to this machine: under a name of its own
# that it lets point here (DNS rebinding: by the Host), or across origins (by Origin).


_log = logging.getLogger(__name__)
PUBLIC_PATHS = frozenset({"/", "/health", "/v1/health"})
"""Paths that need no key: their answers have nothing of anyone's texts."""


def has_key(headers: Headers, keys: Sequence[str]) -> bool:
    """Whether a request brings one of the keys; takes as long for each that is wrong."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    found = False
    for key in keys:
        found |= hmac.compare_digest(given.strip().encode(), key.encode())
    return found


class Guard:
    """Middleware that refuses requests for other servers, of other origins, or without a key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings
        self._on_loopback = is_loopback(settings.host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it with the reason."""
        if scope["type"] == "http":
            error = self._problem(scope, Headers(scope=scope))
            if error is not None:
                await failure(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope, headers: Headers) -> RequestError | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._on_loopback and not is_loopback(host_name(host)):
            problem = f"the Host {host!r} is not this machine's: use http://{self._settings.host}"
            return RequestError(problem, status=HTTPStatus.FORBIDDEN)
        own = origin is None or origin.rpartition("//")[2] == host
        if not own and "*" not in self._settings.cors and origin not in self._settings.cors:
            problem = f"pages of {origin!r} have no access: start the server with --cors {origin}"
            return RequestError(problem, status=HTTPStatus.FORBIDDEN)
        keys = self._settings.api_keys
        is_public = scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PREFIX)
        is_open = not keys or is_public or scope["method"] == "OPTIONS"
        if not is_open and not has_key(headers, keys):
            problem = "the API key is wrong or missing: send it as `Authorization: Bearer KEY`"
            return RequestError(problem, status=HTTPStatus.UNAUTHORIZED)
        return None


class Access:
    """Counts and logs each request when its reply is over, and ends its use of a model."""

    def __init__(self, app: ASGIApp, models: Models, metrics: Metrics) -> None:
        self._app = app
        self._models = models
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through; count it and log it with its status and its time."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._models.release(scope)
            # Unknown paths count as one, or clients could make any number of counters.
            path = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.count_request(path, status)
            seconds = time.perf_counter() - started
            _log.info("%s %s %s %.3f s", scope["method"], scope["path"], status, seconds)


class Tidied:
    """Wraps an application: addresses that clients joined carelessly are those that are meant."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, with one slash for several and without one at the end."""
        if scope["type"] == "http":
            path = re.sub("/{2,}", "/", scope["path"])
            path = re.sub("^(?:/v1)+(?=/v1/)", "", path)
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


def create_app(served: Engine | Models, settings: ServeSettings) -> Starlette:
    """Return the application that answers with an engine, or with one of several models.

    The caller closes them afterwards.
    """
    models = served if isinstance(served, Models) else Models.of_engine(served, settings)
    metrics = Metrics(models)
    app = Starlette(
        routes=routes(),
        middleware=[Middleware(Guard, settings=settings)],
        exception_handlers={SpecrunError: _failed, HTTPException: _not_found, Exception: _failed},
    )
    stack: ASGIApp = Access(app.build_middleware_stack(), models, metrics)
    if settings.cors:  # around all else: pages read refusals and failures, too
        stack = CORSMiddleware(
            stack,
            allow_origins=list(settings.cors),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
        )
    app.middleware_stack = Tidied(stack)
    app.state.models = models
    app.state.metrics = metrics
    app.state.started = int(time.time())
    return app


def routes() -> list[BaseRoute]:
    """Return the table of paths."""
    return [
        *page_routes(),
        *_both("/health", properties.health, "GET"),
        Route("/props", properties.props, methods=["GET"]),
        *_both("/models/load", properties.load_model, "POST"),
        *_both("/models/unload", properties.unload_model, "POST"),
        Route("/slots", properties.slots, methods=["GET"]),
        Route("/metrics", figures.metrics, methods=["GET"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", properties.tokenizer_info, methods=["GET"]),
        Route("/apply-template", tokens.apply_template, methods=["POST"]),
        *_both("/models", properties.list_models, "GET"),
        *_both("/models/{name:path}", properties.get_model, "GET"),
        *_both("/chat/completions", chat.chat_completions, "POST"),
        *_both("/completions", completions.completions, "POST"),
        Route("/infill", completions.infill, methods=["POST"]),
        *_both("/responses", responses.responses, "POST"),
        *_both("/responses/input_tokens", responses.input_tokens, "POST"),
        *_both("/messages", anthropic.messages, "POST"),
        *_both("/messages/count_tokens", anthropic.count_tokens, "POST"),
        *_both("/embeddings", tokens.embeddings, "POST"),
        Route("/api/chat", ollama.chat, methods=["POST"]),
        Route("/api/generate", ollama.generate, methods=["POST"]),
        Route("/api/show", ollama.show, methods=["POST"]),
        Route("/api/tags", ollama.tags, methods=["GET"]),
        Route("/api/ps", ollama.running, methods=["GET"]),
        Route("/api/version", ollama.version, methods=["GET"]),
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
    """Refuse a path or a method that no route has."""
    assert isinstance(problem, HTTPException)
    path, status = request.url.path, problem.status_code
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (problem.headers or {}).get("Allow", "")
        message = f"{path} does not take {request.method}: use {allowed.replace('HEAD, ', '')}"
    else:
        message = f"there is no {path} here: docs/server.md lists the paths"
    return failure(path, RequestError(message, status=status))
