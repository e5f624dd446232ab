"""JSON files of a checkpoint as objects whose values are read by kind, with named errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrun.bindings.errors import FileMissingError, MalformedFileError
from specrun.bindings.files import read_regular
from specrun.convert.names import Named

ObjectOf = Callable[[list[tuple[str, Any]]], dict[str, Any]]
_LARGEST = 200 << 20  # the largest tokenizer.json in use has about 35 MB


class JsonObject(Named):
    """A JSON object and its source. A `null` counts as absent.

    Each method returns the value of a key, or `default` if it is absent, and raises
    MalformedFileError if it is of another kind, or absent without a default.
    """

    def __init__(self, values: Mapping[str, Any], shown: str) -> None:
        self.values = values
        self._shown = shown

    @property
    def shown(self) -> str:
        """The name of its source."""
        return self._shown

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def any(self, key: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value of `key` of any kind, None if it is absent."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1 that fits 32 bits."""
        value = self._get(key, default, lambda v: _is_id(v) and v > 0, "a positive whole number")
        return int(value)

    def token(self, key: str) -> int | None:
        """Return a token id, or None if it is absent or -1, as some configs write "none"."""
        if key not in self or self.any(key) == -1:
            return None
        return int(self._get(key, None, _is_id, "a token id"))

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        return float(self._get(key, default, is_positive, "a positive number"))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        return bool(self._get(key, default, lambda v: isinstance(v, bool), "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return str(self._get(key, default, lambda v: isinstance(v, str), "a string"))

    def items(self, key: str) -> list[Any]:
        """Return a list, empty if it is absent."""
        value: list[Any] = self._get(key, [], lambda v: isinstance(v, list), "a list")
        return value

    def object(self, key: str) -> JsonObject:
        """Return the object inside, empty if it is absent."""
        value = self._get(key, {}, lambda v: isinstance(v, dict), "an object")
        return JsonObject(value, f"{key} in {self.shown}")

    def _get(self, key: str, default: Any, fits: Any, kind: str) -> Any:  # noqa: ANN401 - any JSON
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.malformed(f"lacks {key!r}, which must be {kind}")
            return default
        if not fits(value):
            shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:80] + "..."
            raise self.malformed(f"has {key} = {shown}, which is not {kind}")
        return value


def is_positive(value: object) -> bool:
    """Return whether a JSON value is a number above 0, and not infinity or close to it."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30


def _is_id(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    return type(value) is int and 0 <= value < 2**32


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of keys and values; raises ValueError if a key is there twice.

    JSON allows that, and leaves its meaning open: of two tensors of a name one would be lost.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:60]!r} is there twice")
    return found


def read_json_object(path: Path, object_of: ObjectOf = dict) -> JsonObject:
    """Read a JSON file whose outermost value is an object, with `object_of` as below.

    Raises FileMissingError if it is not there or cannot be read, MalformedFileError for others.
    """
    return parse_json_object(read_small_file(path, "such a file"), str(path), object_of)


def read_small_file(path: Path, kind: str) -> bytes:
    """Return the bytes of a file; raises MalformedFileError if it is too large for `kind`.

    Raises FileMissingError if it is not there or cannot be read.
    """
    with named_errors(path):
        if path.stat().st_size > _LARGEST:
            raise MalformedFileError(f"{path} has over {_LARGEST >> 20} MB, too much for {kind}")
        return read_regular(path)


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of opening or reading `path` into a FileMissingError with an advice."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileMissingError(
            f"there is no {path.name} in {path.parent}; is the checkpoint complete?"
        ) from error
    except OSError as error:
        raise FileMissingError(
            f"{path} cannot be read ({error.strerror}); check its permissions"
        ) from error


def parse_json_object(data: bytes, shown: str, object_of: ObjectOf = dict) -> JsonObject:
    """Return the JSON object in `data`, `shown` in messages; raises MalformedFileError.

    `object_of` makes an object of its keys and values, and raises ValueError for others.
    """
    try:
        value = json.loads(data, object_pairs_hook=object_of)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(
            f"{shown} is not JSON ({str(error)[:100]}); get it again"
        ) from error
    if not isinstance(value, dict):
        raise MalformedFileError(f"{shown} is a JSON {type(value).__name__} instead of an object")
    return JsonObject(value, shown)
