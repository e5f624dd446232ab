"""Values that models write, as JSON: Python's quotes and words, raw line breaks, missing ends."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrun.runtime.chat.reader import BLANK, NotACallError, Reader, Reading
from specrun.runtime.grammar.conditions import listed_values
from specrun.runtime.grammar.references import References, type_of

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS |= {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_ESCAPES = frozenset('"\\/bfnrt')
_BEHIND_TEXTS = ",:=}])"
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_KEY, _COLON, _VALUE, _NEXT = "key", "colon", "value", "next"


@dataclass(slots=True)
class ValueReading:
    """Reads a value, and gives it out as JSON while it comes.

    The forms in which JSON differs are written so: texts in single quotes or between `quote` marks,
    keys without quotes, Python's words, keyword arguments in parentheses (with `names` for those
    that have none), line breaks in texts. Missing parts at one of the `marks`, or at the end of the
    text, are added; a reader that is strict raises `NotACallError` there.
    """

    reader: Reader
    give: Callable[[str], object]
    marks: Sequence[str] = ()
    quote: str = ""
    names: Sequence[str] = ()
    _open: list[str] = field(default_factory=list)
    _state: str = _VALUE
    _pending: str = ""  # white space and a comma, which are given with the text after them

    def value(self) -> Reading[None]:
        """Read the value that comes next."""
        self._state = _VALUE
        while True:
            if not (yield from self._step()):
                return

    def inside(self, bracket: str) -> Reading[None]:
        """Read the rest of a value whose first bracket was read."""
        self._begin(bracket)
        while self._open and (yield from self._step()):
            pass

    def _step(self) -> Reading[bool]:
        """Read the next token; return whether the value goes on."""
        character = yield from self.reader.next()
        if not character or (yield from self._at_mark(character)):
            self._end(character)
            return False
        if character in BLANK:
            self._pending += character
        elif character == ",":
            self._comma()
        elif character in "}])":
            self._close(character)
        elif character in ":=" and self._state != _VALUE:
            if self._state == _COLON:
                self._give(":" if character == ":" else ": ")
                self._state = _VALUE
        elif character in "{[(":
            self._before(is_key=False)
            self._begin(character)
        elif character in "\"'" or (character == self.quote[:1] and (yield from self._quoted())):
            yield from self._text("" if character == self.quote[:1] else character)
        else:
            yield from self._word(character)
        return bool(self._open) or self._state != _NEXT

    # -- brackets ----------------------------------------------------------------------------------

    def _begin(self, bracket: str) -> None:
        is_object = bracket == "{" or (bracket == "(" and not self._open)
        self._give("{" if is_object else "[")
        self._open.append(_CLOSING[bracket])
        self._state = _KEY if is_object else _VALUE

    def _in_object(self) -> bool:
        return self._open[-1] == "}" or self._open == [")"]

    def _close(self, bracket: str) -> None:
        if bracket not in self._open:
            return
        while self._close_last() != bracket:
            pass

    def _close_last(self) -> str:
        self._fill()
        self._pending = self._pending.replace(",", "")
        self._give("}" if self._in_object() else "]")
        self._state = _NEXT
        return self._open.pop()

    def _fill(self) -> None:
        """Give a value to a key that has none."""
        if self._open and self._in_object() and self._state in (_COLON, _VALUE):
            self._give(": null" if self._state == _COLON else "null")
            self._state = _NEXT

    def _comma(self) -> None:
        self._fill()
        if self._open and self._state == _NEXT:
            self._pending += ","
            self._state = _KEY if self._in_object() else _VALUE

    def _end(self, character: str) -> None:
        """Add missing parts: a mark comes, or the text has ended."""
        self.reader.require_more()
        if not character and self.reader.is_cut:
            return
        self._pending = ""
        if not self._open and self._state == _VALUE:
            self._give("null")
        while self._open:
            self._close_last()

    def _at_mark(self, character: str) -> Reading[bool]:
        if not any(mark.startswith(character) for mark in self.marks):
            return False
        self.reader.back(character)
        found = yield from self.reader.ahead(self.marks)
        if not found:
            yield from self.reader.next()
        return found

    # -- keys, texts and words ---------------------------------------------------------------------

    def _before(self, *, is_key: bool) -> None:
        """Give the text before a key or a value: commas, colons and names may be missing."""
        if self._state == _NEXT and self._open:
            self._pending = "," + (self._pending or " ")
            self._state = _KEY if self._in_object() else _VALUE
        elif self._state == _COLON:
            self._give(": ")
            self._state = _VALUE
        if self._state == _KEY and not is_key:
            self._give_name()

    def _give_name(self) -> None:
        """Give the name of a value that stands without one."""
        name, self.names = next(iter(self.names), "value"), self.names[1:]
        self._give(json.dumps(name, ensure_ascii=False) + ": ")
        self._state = _VALUE

    def _after_value(self) -> None:
        self._state = _COLON if self._state == _KEY else _NEXT

    def _give(self, text: str) -> None:
        self.give(self._pending + text)
        self._pending = ""

    def _quoted(self) -> Reading[bool]:
        self.reader.back(self.quote[0])
        if (yield from self.reader.follows(self.quote)):
            return True
        yield from self.reader.next()
        return False

    def _text(self, quote: str) -> Reading[None]:
        """Give the text whose quote was read; "" is the quote mark, which has no escapes."""
        self._before(is_key=self._open != [")"])
        self._give('"')
        give, following, special = self.give, self.reader.next, ('"', "\\", quote or self.quote[0])
        while True:
            character = yield from following()
            if character >= " " and character not in special:
                give(character)
                continue
            if not character:
                self.reader.require_more()
                if not self.reader.is_cut:
                    self.give('"')
                    self._after_value()
                return
            if not quote and character == self.quote[0]:
                if (yield from self._quoted()):
                    break
                if self.reader.is_cut and self.quote.startswith(character + self.reader.rest()):
                    return
            if quote and character == quote and (yield from self._ends_text()):
                break
            if quote and character == "\\":
                escape = yield from self._escape()
                if not self.reader.is_cut or self.reader.rest():  # it may be half of one
                    self.give(escape)
            else:
                self.give(json.dumps(character, ensure_ascii=False)[1:-1])
        self.give('"')
        self._after_value()

    def _ends_text(self) -> Reading[bool]:
        """Whether a quote ends its text: some models do not escape quotes within it."""
        seen = yield from self.reader.next()
        while seen[-1:] and seen[-1] in BLANK:
            following = yield from self.reader.next()
            seen += following
            if not following:
                break
        last = seen.lstrip(BLANK)
        self.reader.back(seen)
        if not last or last in _BEHIND_TEXTS or (last in "\"'" and "\n" in seen):
            return True
        begins = any(mark.startswith(last) for mark in self.marks)
        return begins and (yield from self.reader.ahead(self.marks))

    def _escape(self) -> Reading[str]:
        """Return the escape behind a backslash as JSON has it."""
        character = yield from self.reader.next()
        if character in _ESCAPES:
            return "\\" + character
        if character in ("u", "x"):
            code = yield from self._code(4 if character == "u" else 2)
            if code is None:
                return "\\\\" + character
            if 0xD800 <= code < 0xDC00:  # half of a character: the other half must follow
                if (yield from self.reader.follows("\\u", blank="")):
                    low = yield from self._code(4)
                    if low is not None and 0xDC00 <= low < 0xE000:
                        return f"\\u{code:04x}\\u{low:04x}"
                    self.reader.back("\\u" + (f"{low:04x}" if low is not None else ""))
                return "\\ufffd"
            return "\\ufffd" if 0xDC00 <= code < 0xE000 else f"\\u{code:04x}"
        if character == "'":
            return character
        self.reader.back(character)
        return "\\\\"

    def _code(self, n_digits: int) -> Reading[int | None]:
        digits = ""
        while len(digits) < n_digits:
            character = yield from self.reader.next()
            digits += character
            if not character or character not in "0123456789abcdefABCDEF":
                self.reader.back("" if self.reader.is_cut else digits)
                return None
        return int(digits, 16)

    def _word(self, first: str) -> Reading[None]:
        """Give a number, a word of JSON or Python, or a text without quotes."""
        may_be_key = self._state == _KEY or (self._state == _NEXT and self._in_object())
        ends = ",}])\n" + (":=" if may_be_key else "")
        word, character = first, ""
        while True:
            character = yield from self.reader.next()
            if not character and self.reader.is_cut:
                return
            if not character or character in ends:
                break
            if (yield from self._at_mark(character)):
                character = ""  # it is read again already
                break
            word += character
        self.reader.back(character)
        text = word.rstrip(BLANK)
        is_key = may_be_key and (self._open != [")"] or character in (":", "="))
        self._before(is_key=is_key)
        self._give(json.dumps(text, ensure_ascii=False) if is_key else _word_as_json(text))
        self._pending += word[len(text) :]
        self._after_value()


def _word_as_json(word: str) -> str:
    """Return a word of JSON or Python as JSON, any other one as a text."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        number = float(word)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    if not math.isfinite(number):
        return "null"
    return json.dumps(int(number) if number.is_integer() and "." not in word else number)


def as_json(text: str) -> str:
    """Return the JSON of a value that is whole; raises `NotACallError` if it is none."""
    pieces: list[str] = []
    reader = Reader({}, is_strict=True)
    reader.back(text)
    reading = ValueReading(reader, pieces.append).value()
    try:
        next(reading)
        reading.send("")
    except StopIteration:
        pass
    rest = reader.rest()
    if rest.strip():
        raise NotACallError
    return "".join(pieces)


# -- values of tags, by their schemas --------------------------------------------------------------


def takes_text(schema: object) -> bool:
    """Whether a schema takes texts only."""
    return kinds_of(schema) == {"string"}


def kinds_of(schema: object, root: object = None, depth: int = 8) -> set[str]:
    """Return JSON's types that a schema takes; none if it names none."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    root = schema if root is None else root
    if isinstance(schema.get("$ref"), str):
        target = References(root).target(schema["$ref"]) if isinstance(root, dict) else None
        return set() if target is None else kinds_of(target[0], root, depth - 1)
    listed = listed_values(schema)
    if listed:
        return {*map(type_of, listed)}
    kind = schema.get("type")
    if isinstance(kind, str):
        found = {kind}
    elif isinstance(kind, list):
        found = {each for each in kind if isinstance(each, str)}
    else:
        found = set()
        for word in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(word)
            inner = [kinds_of(each, root, depth - 1) for each in choices or ()]
            if word != "allOf" and not all(inner):
                return set()
            found.update(*inner)
    return found | {"null"} if found and schema.get("nullable") is True else found


def typed(text: str, schema: object, root: object = None) -> str:
    """Return the JSON of a value that stands between tags, by the schema of its argument.

    Texts stay texts; all else is JSON, or Python's writing of it. A value that does not fit the
    schema is a text.
    """
    kinds = kinds_of(schema, root)
    as_text = json.dumps(text, ensure_ascii=False)
    if kinds == {"string"}:
        return as_text
    stripped = text.strip()
    try:
        value: Any = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        try:
            is_word = stripped in _WORDS or stripped[:1] in ("{", "[", "(")
            value = json.loads(as_json(stripped)) if is_word else text
        except (ValueError, RecursionError, NotACallError):
            return as_text
    kind = type_of(value)
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value, kind = int(value), "integer"
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return json.dumps(value, ensure_ascii=False) if fits or "string" not in kinds else as_text


def _refuse(word: str) -> None:
    raise ValueError(word)
