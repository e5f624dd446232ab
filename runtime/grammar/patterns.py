"""Regular expressions of JSON schemas, in the part of their syntax that can be a mask.

Schemas have ECMAScript's syntax, or that of the language that wrote them. Masks have no
assertions: look-arounds, word boundaries and anchors within a text are left out, and a reference
to a group allows any text. The rest allows all that the pattern does, and maybe more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_CATEGORY = re.compile(
    r"L|Lu|Ll|Lt|LC|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|Pc|Pd|Ps|Pe|Pi|Pf|Po|S|Sm|Sc|Sk|So|Z|Zs|Zl|Zp"
    r"|C|Cc|Cf|Letter|Number|Punctuation|Symbol|Separator|Alphabetic|Uppercase|Lowercase"
    r"|(?:Script|sc|Script_Extensions|scx)=(?:Latin|Greek|Cyrillic|Han|Hiragana|Katakana|Hangul"
    r"|Arabic|Hebrew|Thai|Devanagari)"
)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})[?+]?")
_NAMED = re.compile(r"\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\?([a-z]*)(?:-[a-z]+)?(:|\))")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_SHORT = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_ANY, _ANY_TEXT, _NOTHING = "(?s:.)", "(?s:.*)", r"[^\x{0}-\x{10FFFF}]"


class _UnreadableError(ValueError):
    """A part of a pattern has no known meaning."""


@dataclass(slots=True)
class _Item:
    """One item of a sequence: a text, a group, an anchor, or an assertion that is left out."""

    kind: str
    text: str = ""
    inside: list[list[_Item]] = field(default_factory=list)
    times: str = ""


def written(pattern: str) -> tuple[str | None, bool]:
    """Return a pattern that can be a mask, and whether it allows just the same texts.

    None for a pattern that cannot be read.
    """
    reader = _Pattern(pattern)
    try:
        return reader.written(), reader.is_exact
    except (_UnreadableError, RecursionError):
        return None, False


def literal_prefix(pattern: str) -> str:
    """Return a text that all texts of a pattern begin with, as far as one is seen."""
    found = re.match(r"\^((?:[A-Za-z0-9_:/@ -]|\\[-./])+)(.?)", pattern)
    if found is None or "|" in pattern:
        return ""
    prefix = found[1].replace("\\", "")
    return prefix[:-1] if found[2] in tuple("*?{") else prefix


class _Pattern:
    """One pattern, which is read from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text, self._place = pattern, 0
        self.is_exact = True

    def written(self) -> str:
        """Return it in the syntax of Rust's regular expressions."""
        read = self._alternatives()
        if self._place < len(self._text):
            raise _UnreadableError
        return self._joined(read, is_first=True, is_last=True)

    # -- writing -----------------------------------------------------------------------------------

    def _joined(self, sequences: list[list[_Item]], *, is_first: bool, is_last: bool) -> str:
        return "|".join(
            self._sequence(items, is_first=is_first, is_last=is_last) for items in sequences
        )

    def _sequence(self, items: list[_Item], *, is_first: bool, is_last: bool) -> str:
        items = [item for item in items if item.kind != "assertion"]
        made: list[str] = []
        for number, item in enumerate(items):
            begins = is_first and all(each.kind == "start" for each in items[:number])
            ends = is_last and all(each.kind == "end" for each in items[number + 1 :])
            if item.kind in ("start", "end"):
                fits = begins if item.kind == "start" else ends
                if not fits or item.times:
                    self.is_exact = False
                elif item.text not in made:
                    made.append(item.text)
            elif item.kind == "group":
                once = not item.times
                inside = self._joined(item.inside, is_first=begins and once, is_last=ends and once)
                made.append(f"{item.text}{inside}){item.times}")
            else:
                made.append(item.text + item.times)
        return "".join(made)

    # -- reading -----------------------------------------------------------------------------------

    def _alternatives(self) -> list[list[_Item]]:
        sequences = [self._items()]
        while self._ahead("|"):
            sequences.append(self._items())
        return sequences

    def _items(self) -> list[_Item]:
        items: list[_Item] = []
        while self._place < len(self._text) and self._text[self._place] not in "|)":
            item = self._item()
            found = _QUANTIFIER.match(self._text, self._place)
            if found is not None:
                self._place = found.end()
                item.times = found[0]
                if item.times[-1] == "+" and len(item.times) > 1:  # it gives nothing back
                    item.times, self.is_exact = item.times[:-1], False
                if _QUANTIFIER.match(self._text, self._place):
                    raise _UnreadableError
            items.append(item)
        return items

    def _item(self) -> _Item:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return _Item("text", self._class())
        if character == "\\":
            return self._escape()
        if character in "^$":
            return _Item("start" if character == "^" else "end", character)
        if character == ".":
            return _Item("text", ".")
        if character in "*+?" or (
            character == "{" and self._text[self._place : self._place + 1] == ","
        ):
            raise _UnreadableError
        return _Item("text", _literal(ord(character)))

    def _group(self) -> _Item:
        opening = "(?:"
        if self._ahead("?#"):
            self._until(")")
            return _Item("assertion")
        if self._ahead("?P="):
            self._until(")")
            return self._backreference()
        is_assertion = any(self._ahead(each) for each in ("?=", "?!", "?<=", "?<!"))
        if is_assertion or self._ahead("?>"):
            self.is_exact = False
        elif found := _NAMED.match(self._text, self._place):
            self._place = found.end()
        elif found := _FLAGS.match(self._text, self._place):
            self._place = found.end()
            if set(found[1]) - set("isu"):
                raise _UnreadableError
            if found[2] == ")":
                return _Item("text", f"({found[0]}" if found[1] != "u" else "")
            opening = f"({found[0]}"
        elif self._ahead("?"):
            raise _UnreadableError
        inside = self._alternatives()
        if not self._ahead(")"):
            raise _UnreadableError
        return _Item("assertion") if is_assertion else _Item("group", opening, inside)

    def _escape(self) -> _Item:
        character = self._next()
        if character in "bB":
            self.is_exact = False
            return _Item("assertion")
        if character in "AZz":
            return _Item(*(("start", "^") if character == "A" else ("end", "$")))
        if character in "123456789":
            return self._backreference()
        if character == "k" and self._ahead("<"):
            self._until(">")
            return self._backreference()
        if character in "dDwWsS":
            return _Item("text", f"\\{character}")
        if character in "pP":
            try:
                return _Item("text", self._property(character))
            except _UnreadableError:
                self.is_exact = False
                return _Item("text", _ANY)
        return _Item("text", _literal(self._code(character)))

    def _backreference(self) -> _Item:
        self.is_exact = False
        return _Item("text", _ANY_TEXT)

    def _property(self, letter: str) -> str:
        name = self._until("}") if self._ahead("{") else self._next()
        if not _CATEGORY.fullmatch(name):
            raise _UnreadableError
        return f"\\{letter}{{{name}}}"

    def _code(self, character: str) -> int:
        """Return the code point of an escaped character."""
        if character in _SHORT:
            return ord(_SHORT[character])
        if character == "0":
            return 0
        if character == "c":
            return ord(self._next().upper()) % 32
        if character in "xuU":
            return self._hex({"x": 2, "u": 4, "U": 8}[character])
        if character.isalnum():
            raise _UnreadableError
        return ord(character)

    def _hex(self, digits: int) -> int:
        if self._ahead("{"):
            code = _number(self._until("}"))
        else:
            code = _number(self._text[self._place : self._place + digits])
            self._place += digits
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._place)
        if 0xD800 <= code < 0xDC00 and low is not None:  # half of a pair
            self._place = low.end()
            code = 0x10000 + (code - 0xD800 << 10) + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise _UnreadableError
        return code

    def _class(self) -> str:
        is_negated = self._ahead("^")
        if self._ahead("]"):
            return _ANY if is_negated else _NOTHING
        made: list[str] = []
        while not self._ahead("]"):
            low = self._member()
            if self._text[self._place : self._place + 1] == "-" and isinstance(low, int):
                before = self._place
                self._place += 1
                high = None if self._text[self._place : self._place + 1] == "]" else self._member()
                if isinstance(high, int) and high >= low:
                    made.append(f"\\x{{{low:X}}}-\\x{{{high:X}}}")
                    continue
                self._place = before  # a bracket or a class behind it: it is a member itself
            made.append(low if isinstance(low, str) else f"\\x{{{low:X}}}")
        return f"[{'^' if is_negated else ''}{''.join(made)}]"

    def _member(self) -> int | str:
        """Return the code point of a member of a class, or the text of a class in it."""
        if found := _POSIX.match(self._text, self._place):
            self._place = found.end()
            return found[0]
        character = self._next()
        if character != "\\":
            return ord(character)
        character = self._next()
        if character == "b":
            return 8
        if character in "dDwWsS":
            return f"\\{character}"
        return self._property(character) if character in "pP" else self._code(character)

    # -- characters --------------------------------------------------------------------------------

    def _next(self) -> str:
        if self._place >= len(self._text):
            raise _UnreadableError
        self._place += 1
        return self._text[self._place - 1]

    def _ahead(self, text: str) -> bool:
        """Whether this text comes next; it is read then."""
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _until(self, end: str) -> str:
        place = self._text.find(end, self._place)
        if place < 0:
            raise _UnreadableError
        found = self._text[self._place : place]
        self._place = place + 1
        return found


def _number(digits: str) -> int:
    if not re.fullmatch("[0-9a-fA-F]{1,8}", digits):
        raise _UnreadableError
    return int(digits, 16)


def _literal(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character in " _:/@,;=%!'\"<>`"):
        return character
    return f"\\x{{{code:X}}}"
