"""A reply as it comes: reasoning, content and tool calls, whatever the family of its model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Literal

from specrun.runtime.chat.calls import end_calls, read_call, read_calls
from specrun.runtime.chat.families import GENERIC
from specrun.runtime.chat.reader import (
    BLANK,
    CallBegun,
    Content,
    EnoughError,
    NotACallError,
    Part,
    Reader,
    Reading,
    Reasoning,
    merged,
)
from specrun.runtime.chat.syntax import ThinkTags, ToolSyntax


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name, and its arguments as JSON, which is cut where the text was.

    `id` is the name of the call in the conversation: its result comes in a message
    {"role": "tool", "tool_call_id": id, "content": ...}.
    """

    name: str
    arguments: str
    id: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class Reply:
    """The parts of a reply put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def named_calls(self, key: object) -> list[ToolCall]:
        """Return the calls with ids, the same ones for the same key."""
        digests = (sha256(repr((key, place)).encode()) for place in range(len(self.calls)))
        return [
            replace(call, id=f"call_{digest.hexdigest()[:24]}")
            for call, digest in zip(self.calls, digests, strict=True)
        ]

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


Thoughts = Literal["apart", "content", "left out"]
"""The place of the reasoning: in parts of its own, in the content as it is written, or nowhere."""


class ReplyParser:
    """Takes a reply's text or tokens piece by piece and returns the parts that became certain.

    However the text is split, the parts put together are the same. `syntax` and `tools` (the
    schemas of the arguments by name) define a tool call; without a syntax all is content.
    With `think`, the text between these tags at the reply's beginning is reasoning; `thinking`:
    the prompt ends with the first of them. A whole call in a reasoning that never ends is a call.
    After `most_calls` calls the reply is `done`, and the rest is left out.

    Control tokens stand for no text; those in `names` are read by their names. `thoughts` is the
    place of the reasoning: in the content it stands between the marks of `think`.
    """

    def __init__(
        self,
        syntax: ToolSyntax | None = None,
        tools: Mapping[str, Any] | None = None,
        *,
        think: ThinkTags | None = None,
        thinking: bool = False,
        most_calls: int | None = None,
        names: Mapping[int, str] | None = None,
        thoughts: Thoughts = "apart",
    ) -> None:
        self.done = False
        self._names, self._thoughts, self._think = names or {}, thoughts, think
        self._is_within = False  # reasoning that is content
        self._thought: list[str] = []
        self._reader = Reader(tools or {}, most_calls)
        self._reading: Reading[None] | None = None  # none if only content can come
        if syntax is not None or think is not None:
            tags = None if thoughts == "content" else think
            self._reading = _read_reply(self._reader, syntax, tags, thinking)
            next(self._reading)

    @property
    def thought(self) -> str:
        """The reasoning so far that is no content, also if it is left out."""
        return "".join(self._thought)

    def read(self, tokens: Sequence[tuple[int, str]]) -> Sequence[Part]:
        """Return the parts that became certain with tokens: ids, and the texts certain by them."""
        names = self._names
        return self.push("".join([names.get(token, "") + text for token, text in tokens]))

    def push(self, text: str) -> Sequence[Part]:
        """Return the parts that are certain with the next piece of text."""
        if self._reading is None:
            return (Content(text),) if text else ()
        for character in text:
            self._send(character)
        return self._taken()

    def finish(self, text: str = "", *, is_cut: bool = False) -> Sequence[Part]:
        """Return the rest of the parts, with the last of the text.

        Missing parts of arguments are added, unless the text is cut by its length.
        """
        parts = self.push(text)
        self._reader.is_cut = is_cut
        self._send("")
        return [*parts, *self._taken()]

    def _send(self, character: str) -> None:
        if self.done or self._reading is None:
            return
        try:
            self._reading.send(character)
        except (StopIteration, EnoughError):
            self.done = True

    def _taken(self) -> Sequence[Part]:
        """Return the parts that came since, with the reasoning in its place."""
        parts, self._reader.parts = merged(self._reader.parts), []
        if self._thoughts != "content":
            self._thought += [part.text for part in parts if isinstance(part, Reasoning)]
        if self._thoughts == "apart":
            return parts
        if self._thoughts == "left out":
            return [part for part in parts if not isinstance(part, Reasoning)]
        placed: list[Part] = []
        for part in parts:
            is_thought = isinstance(part, Reasoning)
            if self._think is not None and is_thought != self._is_within:
                placed.append(Content(self._think.first if is_thought else self._think.last))
            self._is_within = is_thought
            placed.append(Content(part.text) if isinstance(part, Reasoning) else part)
        return merged(placed)


def _read_reply(
    reader: Reader, syntax: ToolSyntax | None, think: ThinkTags | None, thinking: bool
) -> Reading[None]:
    if syntax is not None and syntax.read is not None:
        yield from syntax.read(reader, syntax)
        return
    calls = syntax if syntax is not None and reader.tools else _NO_CALLS
    around = syntax.around if syntax is not None else ()
    if think is not None:
        yield from _read_reasoning(reader, calls, think, thinking)
        around = (*around, *think.around, *((think.first, think.last) if think.anywhere else ()))
    if syntax is not None:
        yield from reader.follows_any(syntax.begins)
    first = functools.partial(read_call, syntax=calls, mark="")
    if calls.at_start and (yield from reader.attempt(first)):
        yield from end_calls(reader, calls)
    while mark := (yield from read_calls(reader, calls, around)):
        held = reader.release()
        if think is not None and mark == think.first:
            reader.back(held)
            yield from _read_reasoning(reader, calls, think, thinking=False)


_NO_CALLS = ToolSyntax("none", (), "object", GENERIC.form)


def _read_reasoning(
    reader: Reader, calls: ToolSyntax, think: ThinkTags, thinking: bool
) -> Reading[None]:
    """Give out the text before the closing tag, without the white space at its borders."""
    if not thinking and not (yield from reader.follows(think.first)):
        return
    reader.back((yield from reader.after_blank()))
    openers = (*calls.sections, *calls.openers)
    while mark := (yield from reader.until((think.last, *think.around, *openers), Reasoning)):
        held = reader.release()
        if mark not in openers:
            break
        text = yield from _whole_call(reader, calls, mark)
        if not text:
            reader.parts.append(Reasoning(held))
            continue
        held += text
        while not held.endswith(think.last):  # a call that was thought of
            character = yield from reader.next()
            held += character
            if not character:
                reader.back(held)  # the reasoning never ends: it is a call
                return
        reader.parts.append(Reasoning(held.removesuffix(think.last).rstrip(BLANK)))
        break
    reader.back((yield from reader.after_blank()))


def _whole_call(reader: Reader, calls: ToolSyntax, mark: str) -> Reading[str]:
    """Return the text of the whole call that comes behind a mark; "" if there is none."""
    trial = Reader(reader.tools, is_strict=True)
    reading, text = read_call(trial, calls, mark), ""
    try:
        next(reading)
        while True:
            character = yield from reader.next()
            text += character
            reading.send(character)
    except StopIteration:
        rest = trial.rest()
        reader.back(rest)
        return text[: len(text) - len(rest)]
    except NotACallError:
        reader.back(text)
        return ""
