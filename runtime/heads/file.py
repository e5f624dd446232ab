"""Files of heads: their metadata, their target, and their measured accuracies."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import (
    FileMissingError,
    MalformedFileError,
    PairError,
    UnsupportedModelError,
)
from specrun.bindings.files import open_regular
from specrun.bindings.gguf import ArrayValue, GGUFHeader, read_header
from specrun.bindings.models.model import Model
from specrun.bindings.models.model_checks import check_types
from specrun.bindings.models.trial import require_tried_head

# == Head files ====================================================================================
#
# A head's `general.architecture` is `medusa`, `hydra`, `eagle`, or llama.cpp's own `eagle3`; below
# that name stand its sizes, such as `medusa.embedding_length`. `specrun.target.vocabulary_sha256`
# names the tokens of the target it was made for.


TARGET_VOCABULARY = "specrun.target.vocabulary_sha256"

_TOKENS = "tokenizer.ggml.tokens"
# Control and padding tokens that others renamed; llama.cpp lets as many be missing.
_MAX_DIFFERENT_TOKENS = 128


class HeadFile:
    """The header of a head's file, read by name; every fault names the file and key or tensor."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = os.fspath(path)
        self.kind = kind
        self.header: GGUFHeader = read_header(path)
        if self.header.architecture != kind:
            raise UnsupportedModelError(
                f"{self.path} is a file of architecture {self.header.architecture}, and "
                f"{kind}(...) needs {kind} heads"
            )
        check_types(Path(path), self.header.tensors)
        self._tensors = {tensor.name: tensor for tensor in self.header.tensors}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def size(self, name: str, most: int = 1 << 24, *, default: int | None = None) -> int:
        """Return the positive whole number `<kind>.<name>`, or `default` if it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self._fault(name, value)
        return value

    def number(self, name: str, default: float) -> float:
        """Return the positive number `<kind>.<name>`, or `default` if it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e12:
            raise self._fault(name, value)
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return the truth value `<kind>.<name>`, `default` if it is absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._fault(name, value)
        return value

    def numbers(self, name: str) -> list[float] | None:
        """Return the list `<kind>.<name>`, None if it is absent."""
        value = self._value(name)
        if value is None:
            return None
        items: list[Any] = list(value) if isinstance(value, ArrayValue) else [None]
        if not all(isinstance(item, int | float) for item in items):
            raise MalformedFileError(
                f"{self.path} has no list of numbers as {self.kind}.{name}: convert the head again"
            )
        return [float(item) for item in items]

    def _value(self, name: str, default: object = None) -> Any:  # noqa: ANN401 - whatever it holds
        return self.header.metadata.get(f"{self.kind}.{name}", default)

    def _fault(self, name: str, value: object) -> MalformedFileError:
        return MalformedFileError(
            f"{self.path} has {value!r} as {self.kind}.{name}: convert the head again"
        )

    def require(self, tensor: str, shape: Sequence[int]) -> str:
        """Return the name of a tensor that must be there with this shape (ggml's order)."""
        given = self.shape(tensor)
        # GGUF leaves out trailing dimensions of 1.
        if given + (1,) * (4 - len(given)) != tuple(shape) + (1,) * (4 - len(shape)):
            raise MalformedFileError(
                f"{self.path} has {tensor} of shape {list(given)}, and its metadata require "
                f"{list(shape)}"
            )
        return tensor

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of a tensor that must be there, in ggml's order."""
        if tensor not in self._tensors:
            raise MalformedFileError(f"{self.path} has no tensor {tensor}: the head is incomplete")
        return tuple(self._tensors[tensor].shape)

    def type_name(self, tensor: str) -> str:
        """Return the type of a tensor that is there."""
        return self._tensors[tensor].type_name

    def check_target(self, target: Model, *, hidden_key: str = "embedding_length") -> None:
        """Raise PairError, with both values, unless size and vocabulary are those of the target.

        A head that was not seen before is then tried with it in another process.
        `<kind>.<hidden_key>` is the size of the hidden states of the target that the head reads.
        """
        hidden, tokens = self.size(hidden_key), self.header.metadata.get(_TOKENS)
        vocab_size = len(tokens) if isinstance(tokens, ArrayValue) else self.size("vocab_size")
        pair = f"{self.path} cannot draft for {target.path}"
        if hidden != target.n_embd:
            raise PairError(
                f"{pair}: it reads hidden states of {hidden} numbers, and the target's have "
                f"{target.n_embd}"
            )
        if vocab_size != target.vocabulary.size:
            raise PairError(
                f"{pair}: it predicts {vocab_size} tokens, and the target has "
                f"{target.vocabulary.size}"
            )
        made_for = self.header.metadata.get(TARGET_VOCABULARY)
        ours = target.vocabulary.fingerprint.hex()
        if isinstance(made_for, str) and made_for != ours:
            raise PairError(
                f"{pair}: it was made for another vocabulary ({made_for[:12]}..., the target's "
                f"is {ours[:12]}...)"
            )
        if made_for is None:
            self._check_tokens(target, pair)
        require_tried_head(Path(self.path), self.header, target.path, target.header)

    def _check_tokens(self, target: Model, pair: str) -> None:
        """Compare the tokens themselves: llama.cpp's converter writes them, and no fingerprint."""
        ours, theirs = self.header.metadata.get(_TOKENS), target.header.metadata.get(_TOKENS)
        if not isinstance(ours, ArrayValue) or not isinstance(theirs, ArrayValue) or ours == theirs:
            return
        if ours.element_type != "string" or theirs.element_type != "string":
            return  # llama.cpp refused other values than a list of tokens in the target
        n = min(len(ours), len(theirs))
        different = [token for token in range(n) if ours.bytes_at(token) != theirs.bytes_at(token)]
        if len(different) > _MAX_DIFFERENT_TOKENS:
            first = different[0]
            raise PairError(
                f"{pair}: {len(different)} of its tokens are others, the first one token {first}, "
                f"{ours[first]!r} for the head and {theirs[first]!r} for the target"
            )


# == Node accuracies by depth and rank: counted on a text, kept in the GGUF or in a CSV ============
#
# `accuracy[k][r]` is the share of positions at which the guess of rank r at depth k is the right
# token, of those at which the right tokens of the depths above it were guessed too. So the product
# along a path is the probability that the whole path is right, and the products of all paths of a
# depth add up to the probability that any of them is.
#
# In the head's GGUF: `<kind>.node_accuracy`, the rows one after another, and
# `<kind>.node_accuracy_depths`, how many there are (as many as heads if it is absent). Beside
# it: a CSV with the columns head, rank and accuracy, both numbers counted from 0; other columns are
# not read.


Accuracy = tuple[tuple[float, ...], ...]
"""Shares by depth and rank."""

KEY, DEPTHS_KEY = "node_accuracy", "node_accuracy_depths"
_COLUMNS = ("head", "rank", "accuracy")
_MAX_FILE = 1 << 20
_MAX_DEPTH, _MAX_RANK = 64, 1024
_ROUNDING = 1e-3  # shares of a head may add up to this much more than 1, as rounded numbers do


def stored_accuracy(file: HeadFile, n_heads: int | None = None) -> Accuracy | None:
    """Return the accuracies of a head's file, None if it has none; `n_heads` is for old files.

    Those do not contain the number of rows: one for each head. Raises MalformedFileError for
    numbers that are no shares, or that do not make so many rows.
    """
    numbers = file.numbers(KEY)
    if numbers is None:
        return None
    has_depths = f"{file.kind}.{DEPTHS_KEY}" in file.header.metadata
    depths = file.size(DEPTHS_KEY, _MAX_DEPTH) if has_depths or n_heads is None else n_heads
    ranks, rest = divmod(len(numbers), depths)
    if rest or not ranks or not all(0.0 <= number <= 1.0 for number in numbers):
        raise MalformedFileError(
            f"{file.path} has {len(numbers)} accuracies for {depths} heads: calibrate them again "
            "(specrun calibrate)"
        )
    return tuple(tuple(numbers[k * ranks : (k + 1) * ranks]) for k in range(depths))


def read_accuracy_csv(path: str | os.PathLike[str], n_depths: int | None = None) -> Accuracy:
    """Return the accuracies of a CSV file, for at most `n_depths` heads.

    Raises MalformedFileError that names the line for all that is no share by head and rank.
    """
    name = os.fspath(path)
    reader = csv.reader(_text(name).splitlines())
    rows: dict[int, dict[int, float]] = {}
    try:
        head = [column.strip().lower() for column in next(reader, [])]
        if any(column not in head for column in _COLUMNS):
            columns = ", ".join(_COLUMNS)
            raise _BadLine(f"the columns {columns} are missing: name them in the first line")
        places = [head.index(column) for column in _COLUMNS]
        for cells in reader:
            if any(cell.strip() for cell in cells):
                _add(rows, cells, places, n_depths)
        if not rows:
            raise _BadLine("no accuracy is given")
    except csv.Error as error:
        raise _fault(name, reader.line_num, f"it is not CSV ({error})") from error
    except _BadLine as error:
        raise _fault(name, max(1, reader.line_num), str(error)) from None
    return tuple(tuple(row[rank] for rank in range(len(row))) for _, row in sorted(rows.items()))


class _BadLine(Exception):
    """The error of the last line read."""


def _fault(name: str, line: int, problem: str) -> MalformedFileError:
    return MalformedFileError(f"{name}, line {line}: {problem}")


def _text(name: str) -> str:
    try:
        with open_regular(name) as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise FileMissingError(
            f"{name} cannot be read ({error.strerror}): name a CSV file of accuracies"
        ) from error
    if len(data) > _MAX_FILE:
        raise MalformedFileError(
            f"{name} is larger than {_MAX_FILE >> 20} MiB: it is no table of accuracies"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _fault(name, line, "it is not UTF-8 text") from error


def _add(
    rows: dict[int, dict[int, float]],
    cells: Sequence[str],
    places: Sequence[int],
    n_depths: int | None,
) -> None:
    """Add a line's accuracy; heads and ranks must count up from 0."""
    if len(cells) <= max(places):
        raise _BadLine(f"it has {len(cells)} cells")
    head = _count(cells[places[0]], "head", _MAX_DEPTH)
    rank = _count(cells[places[1]], "rank", _MAX_RANK)
    share = _share(cells[places[2]])
    if n_depths is not None and head >= n_depths:
        raise _BadLine(f"head {head} of a file with {n_depths} heads, counted from 0")
    own = rows.setdefault(head, {})
    if rank in own:
        raise _BadLine(f"head {head} has a rank {rank} already")
    if rank != len(own):
        before = f"rank {rank} of head {head} comes before its rank {len(own)}"
        raise _BadLine(f"{before}: list them in order")
    if head and head - 1 not in rows:
        raise _BadLine(f"head {head} comes before head {head - 1}: list them in order")
    own[rank] = share
    total = sum(own.values())
    if total > 1.0 + _ROUNDING:
        sums = f"the accuracies of head {head} add up to {total:.3g}"
        raise _BadLine(f"{sums}: only one guess can be right")


def _count(cell: str, column: str, limit: int) -> int:
    text = cell.strip()
    # Nine digits at most: int() of a long text takes a long time.
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < limit):
        raise _BadLine(f"{column} is {text[:20]!r}: give a whole number from 0 to {limit - 1}")
    return int(text)


def _share(cell: str) -> float:
    text = cell.strip()
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise _BadLine(f"accuracy is {text[:20]!r}: give a share from 0 to 1")
    return share


Counts = npt.NDArray[np.int64]


class RankCounts:
    """Counts at which rank the right token was among the guesses of each depth."""

    def __init__(self, depths: int, ranks: int) -> None:
        self.n_positions = 0
        self._alone: Counts = np.zeros((depths, ranks), np.int64)
        self._below: Counts = np.zeros((depths, ranks), np.int64)
        self._asked: Counts = np.zeros(depths, np.int64)
        self._reached: Counts = np.zeros(depths, np.int64)

    def add(self, guesses: Sequence[Sequence[int]], right: Sequence[int]) -> None:
        """Count one position: the tokens of each depth, and the tokens that came."""
        self.n_positions += 1
        on_path = True
        # On the path, all tokens above were guessed: `below` is
        # conditional on that, `alone` is not.
        for depth, (tokens, token) in enumerate(zip(guesses, right, strict=False)):
            self._asked[depth] += 1
            self._reached[depth] += on_path
            rank = next((place for place, guess in enumerate(tokens) if guess == token), None)
            if rank is not None and rank < self._alone.shape[1]:
                self._alone[depth, rank] += 1
                self._below[depth, rank] += on_path
            else:
                on_path = False

    @property
    def accuracy(self) -> Accuracy:
        """Shares by depth and rank, of the positions where all tokens above were guessed."""
        return _shares(self._below, self._reached)

    @property
    def alone(self) -> Accuracy:
        """Shares by depth and rank, of all positions."""
        return _shares(self._alone, self._asked)

    @property
    def n_asked(self) -> tuple[int, ...]:
        """At how many positions each depth had a token to guess."""
        return tuple(self._asked.tolist())

    @property
    def n_reached(self) -> tuple[int, ...]:
        """At how many positions the tokens above each depth were guessed."""
        return tuple(self._reached.tolist())


def _shares(counts: Counts, totals: Counts) -> Accuracy:
    # A depth that was never reached has no share: 0 and not 0 / 0.
    shares = counts / np.maximum(totals, 1)[:, None]
    return tuple(tuple(row) for row in shares.tolist())
