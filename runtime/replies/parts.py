"""Parts of a reply: reasoning, content, and tool calls whose arguments grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Call number `index` (from 0) of the tool `name` begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """A piece of the arguments of call number `index`: all pieces together are JSON."""

    index: int
    text: str


Part = Reasoning | Content | CallBegun | MoreArguments


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind as one, and empty ones left out."""
    joined: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, CallBegun):
            joined.append(part)
            texts.append("")
        elif part.text:
            if joined and _go_together(joined[-1], part):
                texts[-1] += part.text
            else:
                joined.append(part)
                texts.append(part.text)
    return [_with_text(part, text) for part, text in zip(joined, texts, strict=True)]


def _go_together(before: Part, part: Part) -> bool:
    if isinstance(before, MoreArguments) and isinstance(part, MoreArguments):
        return before.index == part.index
    return type(before) is type(part)


def _with_text(part: Part, text: str) -> Part:
    if isinstance(part, CallBegun):
        return part
    return MoreArguments(part.index, text) if isinstance(part, MoreArguments) else type(part)(text)
