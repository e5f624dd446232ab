"""Which weights something was computed from: what a cache or a checkpoint belongs to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specrun.bindings.gguf_header import read_header

__all__ = ["source_digest", "source_identity"]


def source_identity(path: Path) -> dict[str, Any]:
    """Return what names the weights of a GGUF file or a folder: contents of small files, sizes and times of others."""
    if path.is_file():
        stat = path.stat()
        return {"source": [path.name, stat.st_size, stat.st_mtime_ns, read_header(path).architecture]}
    found = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    weights = sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in path.glob("*.safetensors"))
    return {"source": [found, *([*one] for one in weights)]}


def source_digest(path: Path) -> str:
    """Return 16 hexadecimal digits that stand for the weights."""
    return hashlib.sha256(json.dumps(source_identity(path)).encode()).hexdigest()[:16]
