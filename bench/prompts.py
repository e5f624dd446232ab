"""The prompts that drafters are compared on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.demo import demo_questions

__all__ = ["Prompt", "as_text", "demo_prompts", "read_prompts"]

Prompt = str | tuple[Mapping[str, str], ...]
"""A text, or a conversation: messages with "role" and "content"."""


_KEYS = ("prompt", "question", "text")


def as_text(conversation: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation for models without a chat template: its texts, one below the other."""
    return "".join(message["content"] + "\n" for message in conversation)


def demo_prompts(count: int) -> tuple[str, ...]:
    """Return `count` of the embedded demo's questions, spread evenly over the file."""
    return _spread(read_prompts(demo_questions()), count)


def read_prompts(path: Path) -> tuple[str, ...]:
    """Return a file's prompts: one a line, or for .jsonl the "prompt", "question" or "text" of each object."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text (byte {error.start + 1}); convert it first") from error
    except OSError as error:
        raise FileMissingError(f"{path} cannot be read: {error.strerror}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = tuple(_of_object(line, f"{path}, line {number}") for number, line in lines)
    else:
        prompts = tuple(line for _, line in lines)
    if not prompts:
        raise OptionError(f"{path} holds no prompts: write one a line")
    return prompts


def _spread(prompts: Sequence[str], count: int) -> tuple[str, ...]:
    n = min(count, len(prompts))
    return tuple(prompts[index * len(prompts) // n] for index in range(n))


def _of_object(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}") from error
    for key in _KEYS:
        found = value.get(key) if isinstance(value, dict) else None
        if isinstance(found, str) and found:
            return found
    raise ModelError(f"{where} has no {', '.join(_KEYS[:-1])} or {_KEYS[-1]} that is a text")
