"""A reference text that answers may quote: read, tokenized and ordered in memory when the drafter is opened."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.bindings.vocabulary import Vocabulary
from specrun.runtime.datastore.context_index import ContextIndex
from specrun.runtime.datastore.corpus_text import check_text_file, text_pieces

__all__ = ["MAX_REFERENCE_BYTES", "read_reference"]

MAX_REFERENCE_BYTES = 8 << 20
"""The longest reference text: larger ones would delay the start by more than a few seconds."""


def read_reference(path: Path, vocabulary: Vocabulary) -> ContextIndex:
    """Return the index of a text file's tokens.

    Raises `FileMissingError`, `ModelError` for what is not UTF-8, `OptionError` for an empty or too large file.
    """
    n_bytes = check_text_file(path)
    if n_bytes > MAX_REFERENCE_BYTES:
        raise OptionError(
            f"the reference {path} has {n_bytes / 2**20:,.1f} MiB and may have {MAX_REFERENCE_BYTES >> 20}: shorten "
            "it, or make a datastore of it (specrun datastore build) and draft with rest(STORE)"
        )
    tokens: list[int] = []
    for text, _ in text_pieces(path):
        tokens += vocabulary.tokenize(text, add_special=False)
    if len(tokens) < 2:
        raise OptionError(f"the reference {path} holds {len(tokens)} tokens: at least 2 can be quoted from")
    return ContextIndex.of_text(tokens, vocabulary.size)
