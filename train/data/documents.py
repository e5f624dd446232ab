"""Training data: plain text, JSON Lines, or JSON arrays of texts, prompts with answers, or chats.

Elements of a JSON array are read one at a time: neither file nor array is in memory whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError

_PIECE = 1 << 18  # characters
_SPACE = re.compile(r"[ \t\r\n]*")
_BEGINNING = re.compile(r'\s*\[\s*\{\s*["}]')
"""Of an array of objects; `[1] Introduction` begins a text."""


def array_elements(start: str, rest: TextIO) -> Iterator[Any]:
    """Yield the values of an array, of at least one: its text is `start`, then the `rest`.

    Raises ValueError if the text is no array, naming the element by its number from 1.
    """
    window = _Window(start, rest)
    number, follows = 0, window.next_character()
    while follows in ("[", ","):
        window.take()
        number += 1
        yield window.value(f"element {number}")
        follows = window.next_character()
    if follows != "]":
        after = f"after element {number}"
        raise ValueError(f"{after} comes {follows!r}" if follows else f"it ends {after}")
    window.take()
    if window.next_character():
        raise ValueError(f"more follows its end, which is after element {number}")


class _Window:
    """The part of a file that was read and is still to be parsed."""

    def __init__(self, start: str, rest: TextIO) -> None:
        self._text, self._at, self._rest = start, 0, rest
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Skip space and return the next character; empty at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None  # it matches nothing, too
            self._at = found.end()
            if self._at < len(self._text) or not self._grow():
                return self._text[self._at : self._at + 1]

    def take(self) -> None:
        """Go past a character."""
        self._at += 1

    def value(self, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Return the value that comes next, and go past it; raises ValueError with its `name`."""
        self.next_character()
        while True:
            try:
                found, self._at = self._decoder.raw_decode(self._text, self._at)
                return found
            except json.JSONDecodeError as error:
                if not self._grow():  # there may have been more of it
                    raise ValueError(f"{name} is not JSON ({error.msg})") from error
            except RecursionError as error:
                raise ValueError(f"{name} is nested too deeply") from error

    def _grow(self) -> bool:
        """Read more than is left, so that a long value is not parsed often; False at the end."""
        left = self._text[self._at :]
        piece = self._rest.read(max(_PIECE, len(left)))
        self._text, self._at = left + piece, 0
        return bool(piece)


_START = 1 << 16  # characters that show the kind of file
_PROMPT_KEYS = ("prompt", "question", "instruction")
_ANSWER_KEYS = ("answer", "completion", "response", "output")
_CHAT_KEYS = ("messages", "conversations")
# ShareGPT's names.
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
_KINDS = '{"text"}, {"prompt", "answer"} or {"messages": [{"role", "content"}]}'


@dataclass(frozen=True, slots=True)
class _FromFile:
    """The place a document was read at, such as "line 3 of chats.jsonl", for messages only."""

    origin: str = field(default="", compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class PlainText(_FromFile):
    """A text that is learnt from its first to its last token."""

    text: str


@dataclass(frozen=True, slots=True)
class Answered(_FromFile):
    """A prompt and its answer, which is learnt; None if it is still to be written."""

    prompt: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class Chat(_FromFile):
    """Messages of a role and a content each; only the assistant's are learnt."""

    messages: tuple[Mapping[str, str], ...]


Document = PlainText | Answered | Chat


def read_documents(paths: Sequence[Path], *, need_answers: bool = True) -> list[Document]:
    """Return the documents of all files in order.

    A file that begins with `{` is read as JSON Lines, one that begins as an array of objects as
    their array (ShareGPT), any other as one text. `need_answers` False also takes prompts without
    answers. Raises MalformedFileError naming file and line or element, ModelError if there is
    nothing to learn.
    """
    documents: list[Document] = []
    for path in paths:
        documents += _read_file(path, need_answers=need_answers)
    if not documents:
        names = ", ".join(path.name for path in paths) or "no file"
        raise ModelError(f"{names} has no usable text: give a text file, or lines of {_KINDS}")
    return documents


def _read_file(path: Path, *, need_answers: bool) -> Iterator[Document]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            try:
                yield from _documents(file, path.name, need_answers=need_answers)
            except UnicodeDecodeError as error:
                text = f"{path} is not UTF-8 text{_bad_byte(file, error)}"
                raise MalformedFileError(f"{text}; convert it first") from error
    except FileNotFoundError as error:
        raise FileMissingError(f"there is no file {path} to train on") from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror}); check it") from error


def _documents(file: TextIO, name: str, *, need_answers: bool) -> Iterator[Document]:
    start = file.read(_START)
    while start and not start.strip() and (more := file.read(_START)):
        start += more
    if start.lstrip().startswith("["):
        start += file.read(_START)
    if start.lstrip().startswith("{"):
        records = _lines(start + file.readline(), file, name)
    elif _BEGINNING.match(start):
        records = _elements(start, file, name)
    else:
        text = start + file.read()
        if text.strip():
            yield PlainText(text, origin=name)
        return
    for where, record in records:
        document = _parse_record(record, where, need_answers=need_answers)
        if document is not None:
            yield document


def _lines(start: str, rest: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line that is not empty, and a name for the line."""
    for number, line in enumerate(chain(start.removesuffix("\n").split("\n"), rest), 1):
        if line.strip():
            where = f"line {number} of {name}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise MalformedFileError(
                    f"{where} is not JSON ({error}): each line must be one object, {_KINDS}"
                ) from error
            yield where, record


def _elements(start: str, rest: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each element of an array, and a name for it."""
    try:
        for number, record in enumerate(array_elements(start, rest), 1):
            yield f"element {number} of {name}", record
    except UnicodeDecodeError:  # a ValueError, too
        raise
    except ValueError as error:
        raise MalformedFileError(
            f"the array in {name} is damaged, {error}: each element must be {_KINDS}"
        ) from error


def _bad_byte(file: TextIO, error: UnicodeDecodeError) -> str:
    """Return the byte of the file that is not UTF-8, if it is known: in a pipe it is not."""
    try:
        end = file.buffer.tell()  # the last bytes that were read failed
    except OSError:
        return ""
    return f" (byte {end - len(error.object) + error.start + 1})"


def _parse_record(record: Any, where: str, *, need_answers: bool) -> Document | None:  # noqa: ANN401 - any JSON value
    """Return the document of a line or element, None if its texts are empty."""
    if not isinstance(record, dict):
        raise MalformedFileError(f"{where} is not a JSON object: each must be {_KINDS}")
    for key in _CHAT_KEYS:
        if key in record:
            return _chat(record[key], key, where, need_answers=need_answers)
    prompt, answer = _first(record, _PROMPT_KEYS, where), _first(record, _ANSWER_KEYS, where)
    if prompt is not None and (answer is not None or not need_answers):
        usable = prompt.strip() and (answer or not need_answers)
        return Answered(prompt, answer or None, origin=where) if usable else None
    text = _first(record, ("text",), where)
    if text is None:
        keys = ", ".join(map(repr, list(record)[:6])) or "nothing"
        raise MalformedFileError(f"{where} has {keys}, and {_KINDS} is needed")
    return PlainText(text, origin=where) if text.strip() else None


def _first(record: dict[str, Any], keys: Sequence[str], where: str) -> str | None:
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise MalformedFileError(f"{where} has a {key!r} that is not a text")
            return str(record[key])
    return None


def _chat(messages: object, key: str, where: str, *, need_answers: bool) -> Chat | None:
    if not isinstance(messages, list):
        raise MalformedFileError(f"{key!r} in {where} is not a list of messages")
    found: list[Mapping[str, str]] = []
    for message in messages:
        given = message if isinstance(message, dict) else {}
        role = given.get("role", given.get("from"))
        content = given.get("content", given.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise MalformedFileError(
                f"{key!r} in {where} has a message without a role and a content that are texts"
            )
        role = _ROLES.get(role, role)
        # Answers to nothing: many of ShareGPT's chats begin so, and many templates refuse them.
        if role != "assistant" or any(item["role"] != "system" for item in found):
            found.append({"role": role, "content": content})
    answered = any(item["role"] == "assistant" and item["content"].strip() for item in found)
    asked = any(item["role"] == "user" for item in found)
    return Chat(tuple(found), origin=where) if answered or (asked and not need_answers) else None
