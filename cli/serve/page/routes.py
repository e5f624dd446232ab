"""Static files of the page, with headers that let it load and reach nothing but this server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PREFIX = "/page/"
"""Where the files lie that the page at `/` loads. They are the same for everyone."""

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Models may write anything, and it is shown: no script but the page's own ever runs, and
# nothing can be sent elsewhere.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page: its bytes, its type, and the tag by which a browser checks its copy."""

    body: bytes
    content_type: str
    tag: str

    async def reply(self, request: Request) -> Response:
        """Return the file, or that the browser has it already."""
        headers = {**HEADERS, "ETag": self.tag}
        if self.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.content_type)


def read_page() -> dict[str, PageFile]:
    """Return the files of the page by their names."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        content_type = CONTENT_TYPES.get(file.name[file.name.rfind(".") :])
        if content_type is not None:
            body = file.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            found[file.name] = PageFile(body, content_type, tag)
    return found


def page_routes() -> list[BaseRoute]:
    """Return the routes of the page: `/`, and its files."""
    # Read once: names of requests are looked up here and never become paths.
    return [
        Route("/" if name == "index.html" else PREFIX + name, page.reply)
        for name, page in read_page().items()
    ]
