"""Models split into several GGUF files: the headers of all of them."""

from __future__ import annotations

import re
from pathlib import Path

from specrun.bindings.gguf_header import GGUFHeader, read_any_header

__all__ = ["split_headers"]

_NAME = re.compile(r"(?P<base>.*)-\d{5}-of-\d{5}\.gguf")


def split_headers(path: Path, header: GGUFHeader) -> list[GGUFHeader]:
    """Return the header of a model's first file, and those of its other files as far as they are there.

    llama.cpp names them `base-00001-of-00003.gguf` and so on, and refuses to load a model that is not complete.
    """
    count = header.metadata.get("split.count")
    name = _NAME.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count < 10**5 or name is None:
        return [header]
    others = (path.with_name(f"{name['base']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    return [header, *(read_any_header(other) for other in others if other != path and other.is_file())]
