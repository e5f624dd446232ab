"""What a file was converted from, as one number: the SHA-256 that a converted file carries.

It covers the files that say how to read the checkpoint and the tensors that were converted, each by name, type,
shape and numbers, and nothing of how they are spread over shards. Numbers are hashed in pieces of
`PIECE_BYTES`, so that pieces can be hashed beside each other, and then the hashes of the pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from specrun.convert.source_tensor import SourceTensor

__all__ = ["PIECE_BYTES", "SOURCE_KEY", "SourceDigest"]

PIECE_BYTES = 4 << 20
SOURCE_KEY = "specrun.source.sha256"
"""The key of the metadata."""

_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
)


class SourceDigest:
    """Collects the hashes of a checkpoint's files and tensors, in any order."""

    placeholder = "0" * 64
    """What stands in the file until all tensors have been read: as long as `value`."""

    def __init__(self, folder: Path) -> None:
        self._lines: dict[str, str] = {}
        for name in _FILES:
            path = folder / name
            if path.is_file():
                with path.open("rb") as file:
                    self._lines[f"file {name}"] = hashlib.file_digest(file, "sha256").hexdigest()

    def add(self, tensor: SourceTensor, pieces: Sequence[bytes]) -> None:
        """Add a tensor by the SHA-256 of each of its pieces in order."""
        shape = "x".join(map(str, tensor.shape))
        found = hashlib.sha256(b"".join(pieces)).hexdigest()
        self._lines[f"tensor {tensor.name}"] = f"{tensor.type_name} {shape} {found}"

    @property
    def value(self) -> str:
        """The hash of everything added, as 64 hexadecimal digits."""
        text = "".join(f"{name} {line}\n" for name, line in sorted(self._lines.items()))
        return hashlib.sha256(text.encode()).hexdigest()
