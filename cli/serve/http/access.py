"""The access log and the count of requests: a line each with -v, silent otherwise."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrun.cli.serve.native.metrics import Metrics

_log = logging.getLogger(__name__)


class Access:
    """Counts requests by path and status, and logs each when its reply is over."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, and note what became of it."""
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
            # Of paths that do not exist there is no end: they are one.
            route = scope.get("route")
            path = str(getattr(route, "path", "other"))
            self._metrics.count_request(path, status)
            seconds = time.perf_counter() - started
            _log.info("%s %s %s %.3f s", scope["method"], scope["path"], status, seconds)
