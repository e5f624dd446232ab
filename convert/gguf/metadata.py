"""The metadata of a GGUF file to be written: keys with values of stated types, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gguf import GGUFValueType

Entry = tuple[str, Any, GGUFValueType, GGUFValueType | None]


class Metadata:
    """GGUF keys and values in order. Setting a key again replaces it; empty lists are left out."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Entry]:
        for key, (value, kind, element) in self._entries.items():
            yield key, value, kind, element

    def add(self, entries: Iterable[Entry]) -> None:
        """Set all of `entries`, such as those of other metadata."""
        for entry in entries:
            self.raw(*entry)

    def copy(self) -> Metadata:
        """Return keys and values that can be changed apart from these."""
        copied = Metadata()
        copied.add(self)
        return copied

    def text(self, key: str, value: str) -> None:
        """Set a string."""
        self._entries[key] = value, GGUFValueType.STRING, None

    def count(self, key: str, value: int) -> None:
        """Set an unsigned 32-bit integer: counts, sizes, token ids."""
        self._entries[key] = value, GGUFValueType.UINT32, None

    def counts(self, prefix: str, **values: int) -> None:
        """Set several counts, named in full by `prefix` and a dot before each."""
        for key, value in values.items():
            self.count(f"{prefix}.{key}", value)

    def large_count(self, key: str, value: int) -> None:
        """Set an unsigned 64-bit integer."""
        self._entries[key] = value, GGUFValueType.UINT64, None

    def number(self, key: str, value: float) -> None:
        """Set a 32-bit floating-point number."""
        self._entries[key] = value, GGUFValueType.FLOAT32, None

    def flag(self, key: str, value: bool) -> None:
        """Set a truth value."""
        self._entries[key] = value, GGUFValueType.BOOL, None

    def texts(self, key: str, values: Sequence[str]) -> None:
        """Set an array of strings."""
        self._array(key, values, GGUFValueType.STRING)

    def integers(self, key: str, values: Sequence[int]) -> None:
        """Set an array of signed 32-bit integers."""
        self._array(key, values, GGUFValueType.INT32)

    def numbers(self, key: str, values: Sequence[float]) -> None:
        """Set an array of 32-bit floating-point numbers."""
        self._array(key, values, GGUFValueType.FLOAT32)

    def flags(self, key: str, values: Sequence[bool]) -> None:
        """Set an array of truth values."""
        self._array(key, values, GGUFValueType.BOOL)

    def raw(
        self, key: str, value: object, kind: GGUFValueType, element: GGUFValueType | None
    ) -> None:
        """Set a value of any GGUF type, `element` being the type of an array's elements."""
        self._entries[key] = value, kind, element

    def remove(self, key: str) -> None:
        """Leave a key out; one that is not there is no mistake."""
        self._entries.pop(key, None)

    def _array(self, key: str, values: Sequence[Any], element: GGUFValueType) -> None:
        if len(values):
            self._entries[key] = values, GGUFValueType.ARRAY, element
