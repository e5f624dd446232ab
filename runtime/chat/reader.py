"""Replies read piece by piece: the coroutine that parses, and the parts that it returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeVar

# == Parts of a reply: reasoning, content, and tool calls whose arguments grow =====================


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the model's answer to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Call number `index` (from 0) of the tool `name` begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class MoreArguments:
    """A piece of the arguments of call number `index`: all pieces together are JSON.

    `is_text`: they are the text for a tool that takes one.
    """

    index: int
    text: str
    is_text: bool = False


Part = Reasoning | Content | CallBegun | MoreArguments


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbours of one kind as one, and empty ones left out."""
    joined: list[Part] = []
    kept = (part for part in parts if isinstance(part, CallBegun) or part.text)
    for _, group in groupby(kept, lambda part: (type(part), getattr(part, "index", None))):
        first, *others = group
        if isinstance(first, CallBegun):
            joined += [first, *others]
        else:
            more = (part.text for part in others if not isinstance(part, CallBegun))
            joined.append(replace(first, text="".join((first.text, *more))))
    return joined


# == Incremental parsing: a coroutine receives the characters as they come =========================
#
# The result does not depend on how the text was split, because every reading routine receives one
# character after the other. A possible beginning of a marker or a call is held until it is
# one; if it is none, it is given back as content.


T = TypeVar("T")
Reading = Generator[None, str, T]
"""A routine that waits for characters; "" is the end of the text."""

BLANK = " \t\r\n"
LONGEST_HEAD = 300  # characters before the arguments of a call


class NotACallError(Exception):
    """The text is no call, or has left the syntax in the middle of one."""


class EnoughError(Exception):
    """As many calls as allowed: nothing after them is read."""


@dataclass(slots=True, eq=False)
class Reader:
    """Characters of a reply, and the parts that became certain with them.

    `tools` are the schemas of the arguments by the names of the tools that may be called; a call
    of another name is content. `most_calls` None has no limit. A strict reader takes only calls
    that are whole. `is_cut`: the text ends because it became too long, not by the model's will.
    """

    tools: Mapping[str, Any]
    most_calls: int | None = None
    is_strict: bool = False
    is_cut: bool = False
    parts: list[Part] = field(default_factory=list)
    n_calls: int = 0
    _again: list[str] = field(default_factory=list)  # characters to be read, the first one last
    _last: str = ""  # the text read last, unless it was looked at only
    _held: str | None = None  # the text since a call may have begun
    _ended: bool = False

    # -- characters --------------------------------------------------------------------------------

    def next(self) -> Reading[str]:
        """Return the next character, "" at the end."""
        if self._again:
            character = self._again.pop()
        elif self._ended:
            return ""
        else:
            character = yield
            self._ended = not character
        self._last = character
        if self._held is not None:
            self._held += character
        return character

    def back(self, text: str) -> None:
        """Let the characters just read be read once more."""
        self._again.extend(reversed(text))
        self._last = ""
        if self._held is not None and text:
            self._held = self._held[: -len(text)]

    def after_blank(self) -> Reading[str]:
        """Return the next character that is no white space."""
        character = yield from self.next()
        while character and character in BLANK:
            character = yield from self.next()
        return character

    def follows(self, text: str, blank: str = BLANK) -> Reading[bool]:
        """Read `text` after white space, if it comes; any other text is read again."""
        seen, is_there = yield from self._compared(text, blank)
        if not is_there:
            self.back(seen)
        return is_there

    def follows_any(self, texts: Iterable[str]) -> Reading[str]:
        """Read the first of the texts that comes after white space; return it, or ""."""
        for text in texts:
            if (yield from self.follows(text)):
                return text
        return ""

    def ahead(self, texts: Iterable[str], blank: str = "") -> Reading[bool]:
        """Whether one of the texts comes; it is read again."""
        for text in texts:
            seen, is_there = yield from self._compared(text, blank)
            self.back(seen)
            if is_there:
                return True
        return False

    def _compared(self, text: str, blank: str) -> Reading[tuple[str, bool]]:
        """Read as far as `text` may come behind white space; return that, and whether it came."""
        seen, left = "", text
        while left:
            character = yield from self.next()
            seen += character
            if character == left[0]:
                left = left[1:]
            elif not character or left != text or character not in blank:
                return seen, False
        return seen, True

    def through(self, end: str, stop: str = "") -> Reading[str]:
        """Return the text up to `end`, and with it; "" at a `stop`, or if it does not come soon."""
        seen = ""
        while not seen.endswith(end):
            character = yield from self.next()
            if character in ("", stop) or len(seen) > LONGEST_HEAD:
                return ""
            seen += character
        return seen

    def at_end(self) -> Reading[bool]:
        """Whether nothing but white space comes; it is read again."""
        seen = ""
        while True:
            character = yield from self.next()
            seen += character
            if not character or character not in BLANK:
                self.back(seen)
                return not character

    def rest(self) -> str:
        """Return the text that was looked at and is to be read once more."""
        return "".join(reversed(self._again))

    def require_more(self) -> None:
        """Raise `NotACallError` if the reader is strict: the text is not whole."""
        if self.is_strict:
            raise NotACallError

    # -- text --------------------------------------------------------------------------------------

    def until(
        self, markers: Collection[str], kind: type[Content] | type[Reasoning] = Content
    ) -> Reading[str]:
        """Give out text until a marker comes, and return that, or "" at the end of the text.

        White space before a marker is no content.
        """
        held = ""
        may_begin = {marker[0] for marker in markers} | {*BLANK}
        while True:
            character = yield from self.next()
            if not character:
                self._say_last(held, kind)
                return ""
            if not held and character not in may_begin:
                self.parts.append(kind(character))
                continue
            held += character
            start = held.lstrip(BLANK)
            while start and not any(marker.startswith(start) for marker in markers):
                n_said = len(held) - len(start) + 1
                self.parts.append(kind(held[:n_said]))
                held = held[n_said:]
                start = held.lstrip(BLANK)
            if start in markers:
                self._held = held
                return start

    def release(self) -> str:
        """Hold nothing any more: the text, which is returned, was a marker."""
        held, self._held = self._held or "", None
        return held

    def hold(self) -> None:
        """Keep the text from here, until it has become a call or was given back."""
        if self._held is None:
            self._held = ""

    def _say_last(self, text: str, kind: type[Content] | type[Reasoning]) -> None:
        # White space after calls is how the model ended them.
        if not (self.n_calls and text.isspace()):
            self.parts.append(kind(text))

    # -- calls -------------------------------------------------------------------------------------

    def attempt(self, call: Callable[[Reader], Reading[None]]) -> Reading[bool]:
        """Read a possible call; return whether it was one. If it was none, it is given back."""
        self.hold()
        try:
            yield from call(self)
        except NotACallError:
            self.back(self._last)  # it may begin a marker
            held, self._held = self._held or "", None
            if self._ended and not self._again:
                self._say_last(held, Content)
            else:
                self.parts.append(Content(held))
            return False
        self._held = None
        return True

    def begin(self, name: str) -> None:
        """Give out that a call has begun: from here nothing is taken back."""
        self._held = None
        self.parts.append(CallBegun(self.n_calls, name))
        self.n_calls += 1

    def argue(self, text: str) -> None:
        """Give out a piece of the arguments of the call that has begun."""
        self.parts.append(MoreArguments(self.n_calls - 1, text))

    def end_call(self) -> None:
        """Take the call for whole; raises `EnoughError` if it was the last one wanted."""
        if self.n_calls == self.most_calls:
            raise EnoughError
