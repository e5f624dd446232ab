"""Datastores: corpora as suffix arrays, ordered by context, built, stored and mapped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    ModelError,
    OptionError,
    PairError,
)
from specrun.bindings.files import atomic_path, open_regular, require_free_space
from specrun.bindings.models.vocabulary import Vocabulary

# == The suffix array of the text read backwards: positions by the tokens before them ==============
#
# Read backwards, "the longest suffix of the context" becomes a longest common prefix, and the
# positions with the longest ones lie next to each other: one binary search finds them, and the best
# matches are its neighbours. Contexts are compared up to DEPTH tokens. The tokens nearest to a
# position are packed into one number, its first key, which sorts as they do.
#
# REST (He et al. 2023) builds suffix arrays with libdivsufsort in several parts. Here numpy sorts
# bucket by bucket: positions are split by their last few tokens into buckets of a bounded size,
# each of which is sorted in memory and written behind the one before. So the memory needed does not
# depend on the size of the text, the result is one array, and no compiled library is needed.


DEPTH = 16
"""How many tokens before a position decide its place; so many separators begin the tokens."""

_BUCKET = 2_000_000  # positions sorted at once: about 200 MB
_INDEX_CHUNK = 2_000_000  # positions looked at in one step
_SAMPLED = 65_536  # keys that decide where buckets end
_LARGEST_BUCKET = 4 * _BUCKET

TokenArray = npt.NDArray[np.int32]
Keys = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]


def key_width(vocab_size: int) -> tuple[int, int]:
    """Return the bits of a token, the separator included, and how many tokens fit into one key."""
    # The separator is the token vocab_size; 63 bits, because keys are signed int64.
    bits = max(1, vocab_size.bit_length())
    return bits, max(1, 63 // bits)


def first_keys(tokens: TokenArray, start: int, stop: int, vocab_size: int) -> Keys:
    """Return the first keys of the positions start..stop."""
    bits, per_key = key_width(vocab_size)
    keys = np.zeros(stop - start, np.int64)
    # The token nearest to the position takes the highest bits: keys sort as contexts do.
    for back in range(1, min(per_key, DEPTH) + 1):
        keys <<= bits
        keys |= tokens[start - back : stop - back]
    return keys


def order_by_context(
    tokens: TokenArray, vocab_size: int, progress: Callable[[int], None] = lambda _: None
) -> Iterator[Positions]:
    """Yield all positions in order of their contexts, part by part.

    `tokens` int32 [n] begins with DEPTH separators (the token `vocab_size`) and ends with one; they
    also stand between texts. Positions of separators and those right behind one are left out. Of
    positions with the very same last tokens, at most the last 8 million are kept: more add nothing.
    `progress` receives the number of finished positions.
    """
    done = 0
    for low, high in _buckets(tokens, vocab_size):
        # Of equal first keys, which one bucket must hold, the last are kept to bound memory.
        positions = _positions(tokens, vocab_size, low, high)[-_LARGEST_BUCKET:]
        if len(positions):
            done += len(positions)
            # lexsort sorts by its last key first, so the nearest tokens go last.
            yield positions[np.lexsort(_keys(tokens, positions, vocab_size)[::-1])]
            progress(done)


def _buckets(tokens: TokenArray, vocab_size: int) -> list[tuple[int, int]]:
    """Return ranges of first keys that hold about `_BUCKET` positions each."""
    n = len(tokens)
    stride = max(1, n // _SAMPLED)
    sampled = [
        first_keys(tokens, start, min(start + _INDEX_CHUNK, n), vocab_size)[::stride].copy()
        for start in range(DEPTH, n, _INDEX_CHUNK)
    ]
    # Bounds are quantiles of a sample: exact ones would need all keys in memory.
    keys = np.sort(np.concatenate(sampled))
    count = -(-n // _BUCKET)
    # unique: a frequent context would make equal bounds, and with them empty buckets.
    inner = np.unique(keys[[len(keys) * i // count for i in range(1, count)]]).tolist()
    bounds = [0, *inner, 2**63 - 1]
    return list(itertools.pairwise(bounds))


def _positions(tokens: TokenArray, vocab_size: int, low: int, high: int) -> Positions:
    """Return the positions whose first keys lie in a bucket, ascending."""
    parts = []
    for start in range(DEPTH, len(tokens), _INDEX_CHUNK):
        stop = min(start + _INDEX_CHUNK, len(tokens))
        keys = first_keys(tokens, start, stop, vocab_size)
        wanted = (keys >= low) & (keys < high)
        # A separator is nobody's continuation, and right behind one there is no context to find.
        wanted &= (tokens[start:stop] != vocab_size) & (tokens[start - 1 : stop - 1] != vocab_size)
        parts.append(np.flatnonzero(wanted) + start)
    return np.concatenate(parts)


def _keys(tokens: TokenArray, positions: Positions, vocab_size: int) -> list[Keys]:
    """Return the keys of all DEPTH tokens before some positions, the nearest tokens first."""
    bits, per_key = key_width(vocab_size)
    keys = []
    for first in range(1, DEPTH + 1, per_key):
        key = np.zeros(len(positions), np.int64)
        for back in range(first, min(first + per_key, DEPTH + 1)):
            key <<= bits
            key |= tokens[positions - back]
        keys.append(key)
    return keys


SAMPLE_EVERY = 64
"""Every so many positions, the first key is kept apart: a small table narrows the search down."""

_BACK = np.arange(1, DEPTH + 1)


class ContextIndex:
    """A text's tokens with its positions ordered by context; the arrays may be mapped files.

    `tokens` int32 [n] (see `order_by_context`), `order` uint32 [m], `samples` int64
    [ceil(m / SAMPLE_EVERY)], `vocab_size` the size of the vocabulary, which is also the separator's
    number.
    """

    def __init__(
        self,
        tokens: TokenArray,
        order: npt.NDArray[np.uint32],
        samples: npt.NDArray[np.int64],
        vocab_size: int,
    ) -> None:
        # Plain views: slices of np.memmap cost ten times as much.
        self._tokens = np.asarray(tokens).view(np.ndarray)
        self._order = np.asarray(order).view(np.ndarray)
        self._samples = np.asarray(samples).view(np.ndarray)
        self.vocab_size = vocab_size
        self._bits, per_key = key_width(vocab_size)
        self._per_key = min(per_key, DEPTH)

    @staticmethod
    def of_text(tokens: Sequence[int], vocab_size: int) -> ContextIndex:
        """Return the index of a text that fits into memory."""
        return ContextIndex.of_texts([tokens], vocab_size)

    @staticmethod
    def of_texts(texts: Sequence[Sequence[int]], vocab_size: int) -> ContextIndex:
        """Return the index of several texts that fit into memory."""
        framed = framed_texts(texts, vocab_size)
        parts = list(order_by_context(framed, vocab_size))
        order = np.concatenate(parts).astype(np.uint32) if parts else np.zeros(0, np.uint32)
        samples = _keys(framed, order[::SAMPLE_EVERY].astype(np.int64), vocab_size)[0]
        return ContextIndex(framed, order, samples, vocab_size)

    def __len__(self) -> int:
        return len(self._order)

    def copied(self) -> ContextIndex:
        """Return a copy in memory, so that the file may be replaced."""
        tokens, order, samples = self._tokens.copy(), self._order.copy(), self._samples.copy()
        return ContextIndex(tokens, order, samples, self.vocab_size)

    def texts(self) -> list[list[int]]:
        """Return its texts, without tokens that no vocabulary has."""
        ends = np.flatnonzero(self._tokens == self.vocab_size)
        parts = np.split(self._tokens, ends)
        texts = [part[(part >= 0) & (part < self.vocab_size)].tolist() for part in parts]
        return [text for text in texts if text]

    def excerpt(self, share: float, length: int) -> list[int]:
        """Return up to `length` tokens, no separators, from a place, 0 <= `share` < 1."""
        start = DEPTH + int(share * max(1, len(self._tokens) - DEPTH - length))
        tokens: list[int] = self._tokens[start : start + length].tolist()
        return [token for token in tokens if 0 <= token < self.vocab_size]

    def nearest(
        self, context: Sequence[int], count: int, length: int, min_match: int
    ) -> list[tuple[int, list[int]]]:
        """Return up to `count` places of the longest matches, each match's length and continuation.

        Matches of fewer than `min_match` tokens are left out, and counted up to DEPTH.
        Continuations have up to `length` tokens and end with their text. If more than `count`
        places match equally long, those whose older contexts are nearest are taken.
        """
        if not len(self._order) or not context:
            return []
        query = [*reversed(context[-DEPTH:])]
        # A context shorter than DEPTH is read as the beginning of a text, where separators stand.
        query += [self.vocab_size] * (DEPTH - len(query))
        place = self._search(query)
        # The longest matches are neighbours of where the query belongs: count on either side.
        around = self._order[max(0, place - count) : place + count].astype(np.int64)
        # clip: a damaged file may name positions outside; it then finds continuations that do not
        # match or are cut.
        before = np.take(self._tokens, around[:, None] - _BACK, mode="clip")
        equal = before == np.array(query, np.int32)
        # argmin: the first token that differs.
        matched = np.where(equal.all(axis=1), DEPTH, equal.argmin(axis=1))
        # Separators of a short query match those before a text, and are no tokens of the context.
        matched = np.minimum(matched, len(context))
        # Stable: among equal matches the neighbours' order stays.
        best = np.argsort(-matched, kind="stable")[:count]
        best = best[matched[best] >= min_match]
        follows = around[best][:, None] + np.arange(length)
        rows = np.take(self._tokens, follows, mode="clip").tolist()
        matches = zip(matched[best].tolist(), rows, strict=True)
        return [(match, self._until_end(row)) for match, row in matches]

    def _until_end(self, row: list[int]) -> list[int]:
        # Separators end a text; a damaged file must not feed the target unknown tokens.
        if max(row) < self.vocab_size and min(row) >= 0:
            return row
        return row[: next(i for i, token in enumerate(row) if not 0 <= token < self.vocab_size)]

    def _search(self, query: list[int]) -> int:
        """Return where the query belongs in the order."""
        key = 0
        for token in query[: self._per_key]:
            key = key << self._bits | token
        # Samples are every SAMPLE_EVERY-th first key; the place lies between two of them.
        first, last = (int(self._samples.searchsorted(key, side)) for side in ("left", "right"))
        low, high = max(0, first - 1) * SAMPLE_EVERY, min(last * SAMPLE_EVERY, len(self._order))
        tokens, order = self._tokens, self._order

        def context(place: int) -> list[int]:
            """Return a whole context: first keys hold only the nearest tokens."""
            position = int(order[place])
            found: list[int] = tokens[position - DEPTH : position][::-1].tolist()
            return found

        return low + bisect_left(range(low, high), query, key=context)


# == The file ======================================================================================
#
#        0  magic "specrun datastore\n", version (uint32), length of the JSON (uint32), the JSON
#     4096  tokens int32 [n_tokens], order uint32 [n_positions], samples int64 [n_samples],
#           each at a multiple of 64
#
# All numbers are little-endian. Sizes are checked against the header before anything is mapped.


HEADER_BYTES = 4096
_MAGIC = b"specrun datastore\n"
_VERSION = 1
_ALIGNMENT = 64
_PREFIX = struct.Struct(f"<{len(_MAGIC)}sII")
_LARGEST = 2**32
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The header: `n_tokens` with separators, `n_positions` ordered ones, and where they come from.

    `vocabulary` is the `Vocabulary.fingerprint`, in hex, that the tokens belong to, `n_words` its
    size (the name is the file's), `model` the file it was read from, `crc32` that of everything
    behind the header.
    """

    n_tokens: int
    n_positions: int
    n_words: int
    vocabulary: str
    model: str
    n_files: int
    n_text_bytes: int
    crc32: int = 0

    @property
    def n_samples(self) -> int:
        """How many keys are sampled."""
        return -(-self.n_positions // SAMPLE_EVERY)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where tokens, order and samples begin, and where the file ends."""
        order = _aligned(HEADER_BYTES + 4 * self.n_tokens)
        samples = _aligned(order + 4 * self.n_positions)
        return HEADER_BYTES, order, samples, samples + 8 * self.n_samples


def write_store_header(file: BinaryIO, header: StoreHeader) -> None:
    """Write the header at the beginning of a file."""
    text = json.dumps(dataclasses.asdict(header)).encode()
    file.seek(0)
    file.write((_PREFIX.pack(_MAGIC, _VERSION, len(text)) + text).ljust(HEADER_BYTES, b"\0"))


def read_store_header(path: Path) -> StoreHeader:
    """Return a datastore's header, checked; raises MalformedFileError."""
    try:
        with open_regular(path) as file:
            head = file.read(HEADER_BYTES)
            size = file.seek(0, 2)
    except OSError as error:
        raise FileMissingError(f"the datastore {path} cannot be read: {error.strerror}") from error
    if len(head) < _PREFIX.size or not head.startswith(_MAGIC):
        advice = "make one with `specrun datastore build`"
        raise MalformedFileError(f"{path} is not a datastore: {advice}")
    _, version, length = _PREFIX.unpack_from(head)
    if version != _VERSION:
        raise MalformedFileError(
            f"{path} is a datastore of version {version}; this specrun reads version {_VERSION}: "
            "build it again"
        )
    header = _parsed(head[_PREFIX.size : _PREFIX.size + length], path)
    # Before mapping: reading behind the end of a mapped file kills the process (SIGBUS).
    if size != header.offsets[-1]:
        raise MalformedFileError(
            f"the datastore {path} has {size:,} bytes, and by its header "
            f"{header.offsets[-1]:,}: it is truncated or damaged; build it again"
        )
    return header


def open_store(path: Path, vocabulary: Vocabulary) -> ContextIndex:
    """Return the mapped index of a datastore; raises `PairError` for one of another vocabulary."""
    header, fingerprint = read_store_header(path), vocabulary.fingerprint.hex()
    if header.vocabulary != fingerprint:
        raise PairError(
            f"the datastore {path} was made for another vocabulary ({header.n_words:,} tokens, "
            f"hash {header.vocabulary[:12]}, of {header.model}) than the target's "
            f"({vocabulary.size:,} tokens, hash {fingerprint[:12]}): build it again with -m and "
            "this target"
        )
    return open_mapped(path)


def open_mapped(path: Path) -> ContextIndex:
    """Return the mapped index of a datastore, whatever its vocabulary."""
    header = read_store_header(path)
    tokens, order, samples, _ = header.offsets
    return ContextIndex(
        np.memmap(path, np.dtype("<i4"), "r", tokens, (header.n_tokens,)),
        np.memmap(path, np.dtype("<u4"), "r", order, (header.n_positions,)),
        np.memmap(path, np.dtype("<i8"), "r", samples, (header.n_samples,)),
        header.n_words,
    )


def verify_store(path: Path) -> bool:
    """Return whether a datastore's content still has its header's checksum; reads all of it."""
    return content_checksum(path) == read_store_header(path).crc32


def content_checksum(path: Path) -> int:
    """Return the CRC-32 of everything behind the header."""
    crc = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while data := file.read(_CHUNK):
            crc = zlib.crc32(data, crc)
    return crc


def _parsed(text: bytes, path: Path) -> StoreHeader:
    def malformed(problem: str) -> MalformedFileError:
        return MalformedFileError(f"the datastore {path} {problem}: build it again")

    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise malformed("has a damaged header") from error
    fields = dataclasses.fields(StoreHeader)
    if not isinstance(values, dict) or set(values) != {entry.name for entry in fields}:
        raise malformed("has a header without its fields")
    for entry in fields:
        value = values[entry.name]
        # bool is an int to isinstance, so types are compared.
        whole = type(value) is int and 0 <= value < _LARGEST**2
        if not (isinstance(value, str) if entry.type == "str" else whole):
            raise malformed(f"has a header in which {entry.name} is {str(value)[:40]!r}")
    header = StoreHeader(**values)
    # DEPTH separators begin the tokens and one ends them; no position belongs to any of these.
    possible = 0 < header.n_positions <= header.n_tokens - DEPTH - 1 < _LARGEST
    if not possible or not 0 < header.n_words < 2**31 - 1:
        raise malformed(
            f"claims {header.n_positions:,} positions in {header.n_tokens:,} tokens of a "
            f"vocabulary of {header.n_words:,}, which cannot be"
        )
    return header


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


# == Text files of corpora, read piece by piece: none has to fit into memory =======================


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

    Pieces end with a line if there is one, and never within a character. Raises `ModelError` for
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

    Raises the errors of `read_reference_tokens`.
    """
    return ContextIndex.of_text(read_reference_tokens(path, vocabulary), vocabulary.size)


def read_reference_tokens(path: Path, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of a text file, at least 2.

    Raises `FileMissingError`, `ModelError` for other texts than UTF-8, `OptionError` for an empty
    or too large file.
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


# == Building a datastore: tokenized piece by piece, its suffix array by buckets ===================
#
# It is written beside its place and renamed, so that it appears whole or not at all.


_FEWEST_TOKENS = 2
_MOST_TOKENS = 2**32 - 2 * DEPTH  # positions are 32-bit numbers
_BYTES_PER_TOKEN = 8.2  # of the file: a token, its place in the order, a share of the samples
_USUAL_TOKEN_LENGTH = 3.0  # bytes of text; only to refuse early texts that cannot fit

BuildProgress = Callable[[Literal["reading", "ordering"], int, int], None]
"""Called with the present step, its progress and its size: bytes, positions."""


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
    `SpecrunError` if the disk is too small. Nothing is written then, or after Ctrl-C; the file
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
            header = _header(n_tokens, vocabulary, model, len(files), sum(sizes))
            file.flush()
            require_free_space(output.parent, 4 * n_tokens + n_tokens // 8)
            return _finish(file, aside, header, progress)


def store_tokens(
    texts: Sequence[Sequence[int]], vocabulary: Vocabulary, output: Path, *, model: str
) -> StoreHeader:
    """Write a datastore of texts that are tokens already, over an earlier one; only its owner's.

    The file appears whole or not at all. `texts` have at least two tokens each.
    """
    framed = framed_texts(texts, vocabulary.size)
    header = _header(len(framed), vocabulary, model, len(texts))
    with atomic_path(output, force=True) as aside:
        aside.chmod(0o600)
        with aside.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(framed.astype("<i4").tobytes())
            file.flush()
            return _finish(file, aside, header, lambda *_: None)


def framed_texts(texts: Sequence[Sequence[int]], vocab_size: int) -> TokenArray:
    """Return the tokens of texts one behind the other, framed and parted by separators."""
    parts = [np.full(DEPTH, vocab_size, np.int32)]
    for text in texts:
        parts += [np.array(text, np.int32), np.array([vocab_size], np.int32)]
    return np.concatenate(parts)


def _header(
    n_tokens: int, vocabulary: Vocabulary, model: str, n_files: int, n_text_bytes: int = 0
) -> StoreHeader:
    """Return the header of a store whose positions are not ordered yet."""
    hashed, model = vocabulary.fingerprint.hex(), Path(model).name[:200]
    return StoreHeader(n_tokens, 0, vocabulary.size, hashed, model, n_files, n_text_bytes)


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
            # A text's pieces follow each other without a separator: matches may cross there.
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


def _finish(
    file: BinaryIO, path: Path, header: StoreHeader, progress: BuildProgress
) -> StoreHeader:
    """Write the ordered positions, the sampled keys and the whole header; return that."""
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
        samples.append(_keys(tokens, sampled.astype(np.int64), header.n_words)[0])
        n_positions += len(order)
    if not n_positions:
        raise OptionError("no file of the corpus holds two tokens: there is nothing to continue")
    header = dataclasses.replace(header, n_positions=n_positions)
    file.seek(header.offsets[2])
    file.write(np.concatenate(samples).astype("<i8").tobytes())
    progress("ordering", total, total)
    file.flush()
    os.fsync(file.fileno())
    header = dataclasses.replace(header, crc32=content_checksum(path))
    write_store_header(file, header)
    return header
