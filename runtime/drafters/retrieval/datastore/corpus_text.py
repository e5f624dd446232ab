"""Text files of corpora and references, read piece by piece so that none has to fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.bindings.regular_file import open_regular
from specrun.runtime.drafters.retrieval.datastore.context_index import ContextIndex

_PIECE = 1 << 18


def check_text_file(path: Path) -> int:
    """Return the size of a text file in bytes; raises FileMissingError if it cannot be read."""
    if path.is_dir():
        raise FileMissingError(f"{path} is a folder: name its files, as in {path}/*.txt")
    try:
        with open_regular(path) as file:
            return file.seek(0, 2)
    except OSError as error:
        raise FileMissingError(
            f"{path} cannot be read ({error.strerror}); check the name and permissions"
        ) from error


def text_pieces(path: Path, piece: int = _PIECE) -> Iterator[tuple[str, int]]:
    """Yield a file's text in pieces of about `piece` bytes, each with its size in bytes.

    Pieces end with a line where there is one, and never within a character. Raises `ModelError` for
    bytes that are not UTF-8.
    """
    done, rest = 0, b""
    try:
        with open_regular(path) as file:
            while True:
                read = file.read(piece)
                data = rest + read
                cut = _last_end(data) if read else len(data)
                if cut:
                    yield _decoded(data[:cut], done, path), cut
                done += cut
                rest = data[cut:]
                if not read:
                    return
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror})") from error


def _last_end(data: bytes) -> int:
    """Return where to cut: behind the last line, else before the last character."""
    line_end = data.rfind(b"\n") + 1
    if line_end:
        return line_end
    # The last character may be cut short: go back to its first byte.
    cut = len(data) - 1
    while cut > max(0, len(data) - 4) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return max(cut, 0)


def _decoded(data: bytes, offset: int, path: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is not UTF-8 text (byte {offset + error.start + 1}); convert it first"
        ) from error


MAX_REFERENCE_BYTES = 8 << 20
"""The longest reference text: larger ones would delay the start by more than a few seconds."""


def read_reference(path: Path, vocabulary: Vocabulary) -> ContextIndex:
    """Return the index of a text file's tokens: a reference, which answers may quote.

    Raises what `read_reference_tokens` does.
    """
    return ContextIndex.of_text(read_reference_tokens(path, vocabulary), vocabulary.size)


def read_reference_tokens(path: Path, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of a text file, at least 2.

    Raises `FileMissingError`, `ModelError` for what is not UTF-8, `OptionError` for an empty or too
    large file.
    """
    n_bytes = check_text_file(path)
    if n_bytes > MAX_REFERENCE_BYTES:
        raise OptionError(
            f"the reference {path} has {n_bytes / 2**20:,.1f} MiB and may have "
            f"{MAX_REFERENCE_BYTES >> 20}: shorten it, or make a datastore of it (specrun "
            "datastore build) and draft with rest(STORE)"
        )
    tokens: list[int] = []
    for text, _ in text_pieces(path):
        tokens += vocabulary.tokenize(text, add_special=False)
    if len(tokens) < 2:
        raise OptionError(
            f"the reference {path} holds {len(tokens)} tokens: at least 2 can be quoted from"
        )
    return tokens
