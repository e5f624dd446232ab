"""The merges of a BPE tokenizer.json."""

from __future__ import annotations

from specrun.bindings.errors import MalformedFileError
from specrun.convert.json_file import JsonObject

__all__ = ["read_merges"]


def read_merges(tokenizer: JsonObject) -> list[tuple[str, str]]:
    """Return the pairs that merge, the first first; raises MalformedFileError if there are none, or no pairs."""
    merges: list[tuple[str, str]] = []
    for entry in tokenizer.object("model").items("merges"):
        # Before transformers 4.45 a merge was one string.
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) and p for p in parts):
            raise MalformedFileError(f"{tokenizer.shown} has a merge {str(entry)[:60]!r}, which is not two words")
        merges.append((parts[0], parts[1]))
    if not merges:
        raise MalformedFileError(f"{tokenizer.shown} has no merges, which a BPE tokenizer needs")
    return merges
