"""Packages that serving needs: those of the extra `serve`."""

from __future__ import annotations

import importlib.util

from specrun.bindings.errors import MissingPackageError

_PACKAGES = {
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "sse_starlette": "sse-starlette",
    "msgspec": "msgspec",
    "prometheus_client": "prometheus-client",
}


def require_packages() -> None:
    """Raise `MissingPackageError` for the first one that is not installed."""
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            raise MissingPackageError("specrun serve", package, "serve")
