"""Training data: plain text, or JSON Lines of texts, of prompts with answers, or of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.bindings.errors import FileMissingError, MalformedFileError, ModelError

__all__ = ["Answered", "Chat", "Document", "PlainText", "read_documents"]

_PROMPT_KEYS = ("prompt", "question", "instruction")
_ANSWER_KEYS = ("answer", "completion", "response", "output")
_CHAT_KEYS = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}  # ShareGPT's names
_KINDS = '{"text"}, {"prompt", "answer"} or {"messages": [{"role", "content"}]}'


@dataclass(frozen=True, slots=True)
class PlainText:
    """A text that is learnt from its first to its last token."""

    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer; only the answer is learnt. `answer` is None where it is still to be written."""

    prompt: str
    answer: str | None


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages of a role and a content each; only the assistant's are learnt."""

    messages: tuple[Mapping[str, str], ...]


Document = PlainText | Answered | Chat


def read_documents(paths: Sequence[Path], *, need_answers: bool = True) -> list[Document]:
    """Return the documents of all files in order.

    A file whose first character is `{` is read as JSON Lines, any other as one text. `need_answers` False also takes
    prompts without answers. Raises MalformedFileError naming file and line, ModelError if there is nothing to learn.
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
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise FileMissingError(f"there is no file {path} to train on") from error
    except UnicodeDecodeError as error:
        raise MalformedFileError(f"{path} is not UTF-8 text (byte {error.start + 1}); convert it first") from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read ({error.strerror}); check the path") from error
    if not text.lstrip().startswith("{"):
        if text.strip():
            yield PlainText(text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            document = _parse_line(line, f"line {number} of {path.name}", need_answers=need_answers)
            if document is not None:
                yield document


def _parse_line(line: str, where: str, *, need_answers: bool) -> Document | None:
    """Return the document of a line, None where its texts are empty."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MalformedFileError(f"{where} is not JSON ({error}): each line must be one object, {_KINDS}") from error
    if not isinstance(record, dict):
        raise MalformedFileError(f"{where} is not a JSON object: each line must be {_KINDS}")
    for key in _CHAT_KEYS:
        if key in record:
            return _chat(record[key], f"{key!r} in {where}", need_answers=need_answers)
    prompt, answer = _first(record, _PROMPT_KEYS, where), _first(record, _ANSWER_KEYS, where)
    if prompt is not None and (answer is not None or not need_answers):
        return Answered(prompt, answer or None) if prompt.strip() and (answer or not need_answers) else None
    text = _first(record, ("text",), where)
    if text is None:
        keys = ", ".join(map(repr, list(record)[:6])) or "nothing"
        raise MalformedFileError(f"{where} has {keys}, and {_KINDS} is needed")
    return PlainText(text) if text.strip() else None


def _first(record: dict[str, Any], keys: Sequence[str], where: str) -> str | None:
    for key in keys:
        if key in record:
            if not isinstance(record[key], str):
                raise MalformedFileError(f"{where} has a {key!r} that is not a text")
            return str(record[key])
    return None


def _chat(messages: object, where: str, *, need_answers: bool) -> Chat | None:
    if not isinstance(messages, list):
        raise MalformedFileError(f"{where} is not a list of messages")
    found: list[Mapping[str, str]] = []
    for message in messages:
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        content = message.get("content", message.get("value")) if isinstance(message, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise MalformedFileError(f"{where} has a message without a role and a content that are texts")
        found.append({"role": _ROLES.get(role, role), "content": content})
    answered = any(one["role"] == "assistant" and one["content"].strip() for one in found)
    asked = any(one["role"] == "user" for one in found)
    return Chat(tuple(found)) if answered or (asked and not need_answers) else None
