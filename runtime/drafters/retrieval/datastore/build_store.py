"""Builds a datastore from text files: tokenized piece by piece, its suffix array by buckets.

It is written beside its place and renamed, so that it appears whole or not at all.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from specrun.bindings.atomic import atomic_path, require_free_space
from specrun.bindings.errors import OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafters.retrieval.datastore.context_index import (
    DEPTH,
    SAMPLE_EVERY,
    order_by_context,
    sample_keys,
)
from specrun.runtime.drafters.retrieval.datastore.corpus_text import check_text_file, text_pieces
from specrun.runtime.drafters.retrieval.datastore.store_file import (
    HEADER_BYTES,
    StoreHeader,
    content_checksum,
    write_store_header,
)

_FEWEST_TOKENS = 2
_MOST_TOKENS = 2**32 - 2 * DEPTH  # positions are 32-bit numbers
_BYTES_PER_TOKEN = 8.2  # of the file: a token, its place in the order, a share of the samples
_USUAL_TOKEN_LENGTH = 3.0  # bytes of text; only to refuse early what cannot fit

BuildProgress = Callable[[Literal["reading", "ordering"], int, int], None]
"""Called with what is done now, how much of it is done and how much there is: bytes, positions."""


def build_store(
    files: Sequence[Path],
    vocabulary: Vocabulary,
    output: Path,
    *,
    model: str,
    force: bool = False,
    progress: BuildProgress = lambda _what, _done, _total: None,
) -> StoreHeader:
    """Tokenize `files` and write a datastore; memory stays at a few hundred MB for any size.

    `model` names the file of the vocabulary, for messages. Texts are kept apart by separators.
    Raises `OptionError` for an existing `output` without `force`, and for a corpus that is empty or
    too large; `FileMissingError` and `ModelError` for files that cannot be read or are not UTF-8;
    `SpecrunError` where the disk is too small. Nothing is written then, or after Ctrl-C; the file
    appears whole or not at all.
    """
    sizes = [check_text_file(path) for path in files]
    if any(output.exists() and path.samefile(output) for path in files):
        raise OptionError(f"{output} is one of the texts: name another file to write")
    with atomic_path(output, force=force) as aside:
        # An estimate before any work; the exact size is checked once the tokens are counted.
        require_free_space(output.parent, int(sum(sizes) / _USUAL_TOKEN_LENGTH * _BYTES_PER_TOKEN))
        with aside.open("r+b") as file:
            n_tokens = _write_tokens(file, files, sum(sizes), vocabulary, progress)
            header = StoreHeader(
                n_tokens=n_tokens,
                n_positions=0,
                n_words=vocabulary.size,
                vocabulary=vocabulary.fingerprint.hex(),
                model=Path(model).name[:200],
                n_files=len(files),
                n_text_bytes=sum(sizes),
            )
            file.flush()
            require_free_space(output.parent, 4 * n_tokens + n_tokens // 8)
            header = _write_order(file, aside, header, progress)
            write_store_header(file, dataclasses.replace(header, crc32=_checksum(file, aside)))
    return header


def _write_tokens(
    file: BinaryIO,
    files: Sequence[Path],
    n_bytes: int,
    vocabulary: Vocabulary,
    progress: BuildProgress,
) -> int:
    """Write the tokens of all files behind the header, framed by separators; return how many."""
    separator = np.array([vocabulary.size], "<i4")
    file.seek(HEADER_BYTES)
    file.write(np.repeat(separator, DEPTH).tobytes())
    n_tokens, done = DEPTH, 0
    for path in files:
        for text, size in text_pieces(path):
            tokens = np.array(vocabulary.tokenize(text, add_special=False), "<i4")
            # A text's pieces follow each other without a
            # separator: matches may cross their boundary.
            file.write(tokens.tobytes())
            n_tokens += len(tokens)
            done += size
            if n_tokens > _MOST_TOKENS:
                raise OptionError(
                    f"the corpus has more than {_MOST_TOKENS:,} tokens, the most of one datastore"
                )
            progress("reading", done, n_bytes)
        file.write(separator.tobytes())
        n_tokens += 1
    held = n_tokens - DEPTH - len(files)
    if held < _FEWEST_TOKENS:
        texts = str(files[0]) if len(files) == 1 else f"{len(files)} files"
        raise OptionError(
            f"the corpus ({texts}) holds {held} tokens: a datastore needs at least {_FEWEST_TOKENS}"
        )
    return n_tokens


def _write_order(
    file: BinaryIO, path: Path, header: StoreHeader, progress: BuildProgress
) -> StoreHeader:
    """Write the ordered positions and the sampled keys; return the header with their number."""
    tokens = np.memmap(path, np.dtype("<i4"), "r", HEADER_BYTES, (header.n_tokens,))
    _, begin, _, _ = header.offsets
    file.seek(begin)
    n_positions, samples, total = 0, [], header.n_tokens - DEPTH
    ordered = order_by_context(
        tokens, header.n_words, lambda done: progress("ordering", done, total)
    )
    for part in ordered:
        order = part.astype("<u4")
        file.write(order.tobytes())
        # Every SAMPLE_EVERY-th of all positions, counted across parts.
        sampled = order[-n_positions % SAMPLE_EVERY :: SAMPLE_EVERY]
        samples.append(sample_keys(tokens, sampled, header.n_words))
        n_positions += len(order)
    if not n_positions:
        raise OptionError("no file of the corpus holds two tokens: there is nothing to continue")
    header = dataclasses.replace(header, n_positions=n_positions)
    file.seek(header.offsets[2])
    file.write(np.concatenate(samples).astype("<i8").tobytes())
    progress("ordering", total, total)
    return header


def _checksum(file: BinaryIO, path: Path) -> int:
    file.flush()
    os.fsync(file.fileno())
    return content_checksum(path)
