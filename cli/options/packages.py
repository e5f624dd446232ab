"""Packages that not every installation has: asked for before anything takes time."""

from __future__ import annotations

from importlib.util import find_spec

from specrun.bindings.errors import MissingPackageError

_TRAINING = ("torch", "transformers", "safetensors", "gguf")


def require_training(what: str) -> None:
    """Raise MissingPackageError, which says how to get them, where `what` cannot learn."""
    missing = next((name for name in _TRAINING if find_spec(name) is None), None)
    if missing is not None:
        raise MissingPackageError(what, missing, "train")
