"""A reply as it comes: which of its text is reasoning, which content, which a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.runtime.replies.parts import (
    CallBegun,
    Content,
    Part,
    Reasoning,
    merged,
)
from specrun.runtime.replies.reader import EnoughError, Reader, Reading
from specrun.runtime.replies.syntaxes import ThinkTags, ToolSyntax


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name, and its arguments as the model wrote them, JSON if it was able."""

    name: str
    arguments: str


@dataclass(slots=True)
class Reply:
    """The parts of a reply put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Sequence[Part]) -> None:
        """Take the next parts."""
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoning += part.text
            elif isinstance(part, Content):
                self.content += part.text
            elif isinstance(part, CallBegun):
                self.calls.append(ToolCall(part.name, ""))
            else:
                call = self.calls[part.index]
                self.calls[part.index] = ToolCall(call.name, call.arguments + part.text)


class ReplyParser:
    """Takes a reply's text piece by piece and returns the parts that became certain.

    However the text is split, the parts put together are the same. `syntax` and `tools` (the
    schemas of the arguments by name) say what a tool call is; without a syntax all is content.
    With `think`, what stands between these tags at the reply's beginning is reasoning; where the
    prompt ends with the first of them, `thinking` says so. After `most_calls` calls the reply is
    `done`, and what follows is left out.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None = None,
        tools: Mapping[str, Any] | None = None,
        *,
        think: ThinkTags | None = None,
        thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self.done = False
        self._reader = Reader(tools or {}, most_calls)
        self._reading = _read_reply(self._reader, syntax, think, thinking)
        next(self._reading)

    def push(self, text: str) -> list[Part]:
        """Return what is certain with the next piece of text."""
        for character in text:
            self._send(character)
        return self._taken()

    def finish(self) -> list[Part]:
        """Return what was held back: the text has ended."""
        self._send("")
        return self._taken()

    def _send(self, character: str) -> None:
        if self.done:
            return
        try:
            self._reading.send(character)
        except (StopIteration, EnoughError):
            self.done = True

    def _taken(self) -> list[Part]:
        parts, self._reader.parts = self._reader.parts, []
        return merged(parts)


def _read_reply(
    reader: Reader, syntax: ToolSyntax | None, think: ThinkTags | None, thinking: bool
) -> Reading[None]:
    if think is not None:
        yield from _read_reasoning(reader, think, thinking)
    if syntax is not None and reader.tools:
        yield from syntax.read(reader)
    yield from reader.until(())


def _read_reasoning(reader: Reader, tags: ThinkTags, thinking: bool) -> Reading[None]:
    """Give out what stands before the closing tag, without the white space at its borders."""
    first, last = tags
    if not thinking and not (yield from reader.follows(first)):
        return
    reader.back((yield from reader.after_blank()))
    yield from reader.until((last,), Reasoning)
    reader.release()
    reader.back((yield from reader.after_blank()))
