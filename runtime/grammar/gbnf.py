"""Grammars in llama.cpp's notation, GBNF, as rules of characters: there is no lexer in it.

A rule is a list of alternatives, an alternative a list of symbols: characters, a token, or another
rule. Repetitions become rules. Left recursion, which llama.cpp refuses, is turned around.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Ranges = tuple[tuple[int, int], ...]
Reference = int
"""A rule, by its place in the list of rules."""

_MOST_SYMBOLS = 1_000_000
_LAST = 0x10FFFF
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_SPACE, _SPACES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_TIMES = re.compile(r"\{[ \t]*(\d+)[ \t]*(?:(,)[ \t]*(\d+)?[ \t]*)?\}")
_TOKEN = re.compile(r"(!?)<(?:\[(\d+)\]>|([^>]*)>)")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {each: each for each in '\\"[]-'}
_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of these ranges of code points; NUL is none, as in llama.cpp."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class OneToken:
    """One token by its id, or with `is_other` any but this."""

    token: int
    is_other: bool = False


Symbol = Characters | OneToken | Reference
Sequence_ = list[Symbol]
Rule = list[Sequence_]


class NotationError(ValueError):
    """A text is no GBNF grammar, or one that is not supported."""


def rules_of(text: str, token_named: Callable[[str], int | None]) -> list[Rule]:
    """Return the rules of a grammar, `root` first; raises `NotationError`.

    `token_named` returns the token that has a name such as `<think>`, None if there is none.
    """
    rules = _Reader(text, token_named).rules()
    return _without_left_recursion(rules)


@dataclass(slots=True)
class _Reader:
    """A reader of one text."""

    text: str
    token_named: Callable[[str], int | None]
    place: int = 0
    n_symbols: int = 0
    names: dict[str, int] = field(default_factory=dict)
    made: list[Rule | None] = field(default_factory=list)

    def rules(self) -> list[Rule]:
        self._named("root")
        self._skip(_SPACES)
        while self.place < len(self.text):
            self._rule()
        for name, number in self.names.items():
            if self.made[number] is None:
                self.place = len(self.text)
                raise NotationError(f"Rule {name!r} not found")
        return [rule for rule in self.made if rule is not None]

    def _rule(self) -> None:
        name = _WORD.match(self.text, self.place)
        if name is None:
            raise self._wrong("Expected name")
        self.place = name.end()
        self._skip(_SPACE)
        if not self._ahead("::="):
            raise self._wrong("Expected ::=")
        self._skip(_SPACES)
        number = self._named(name[0])
        self.made[number] = self._alternatives(_SPACE)
        if self.place < len(self.text) and self.text[self.place] not in "\r\n":
            raise self._wrong("Expected newline or end")
        self._skip(_SPACES)

    def _alternatives(self, space: re.Pattern[str]) -> Rule:
        found = [self._sequence(space)]
        while self._continues():
            self._skip(_SPACES)
            found.append(self._sequence(space))
        return found

    def _continues(self) -> bool:
        """Whether another alternative follows, maybe on the next line."""
        ahead = _SPACES.match(self.text, self.place)
        end = self.place if ahead is None else ahead.end()
        if not self.text.startswith("|", end):
            return False
        self.place = end + 1
        return True

    def _sequence(self, space: re.Pattern[str]) -> Sequence_:
        found: Sequence_ = []
        while (item := self._item()) is not None:
            self._skip(space)
            while (times := self._times()) is not None:
                self._skip(space)
                item = self._repeated(item, *times)
            self.n_symbols += len(item)
            if self.n_symbols > _MOST_SYMBOLS:
                raise NotationError("it is too large: repeat less")
            found += item
        return found

    def _item(self) -> Sequence_ | None:
        """Return the symbols of the next item; None at the end of a sequence."""
        character = self.text[self.place : self.place + 1]
        if character == '"':
            self.place += 1
            return self._literal()
        if character == "[":
            self.place += 1
            return self._class()
        if character == ".":
            self.place += 1
            return [Characters(((1, _LAST),))]
        if character == "(":
            self.place += 1
            self._skip(_SPACES)
            inside = self._alternatives(_SPACES)
            if not self._ahead(")"):
                raise self._wrong("Expected ')'")
            return inside[0] if len(inside) == 1 else [self._new(inside)]
        if token := _TOKEN.match(self.text, self.place):
            self.place = token.end()
            return [self._token(token)]
        if name := _WORD.match(self.text, self.place):
            self.place = name.end()
            return [self._named(name[0])]
        return None

    def _literal(self) -> Sequence_:
        found: Sequence_ = []
        while not self._ahead('"'):
            code = self._character()
            found.append(Characters(((code, code),)))
        return found

    def _class(self) -> Sequence_:
        is_other = self._ahead("^")
        ranges: list[tuple[int, int]] = []
        while not self._ahead("]"):
            low = high = self._character()
            if (
                self.text.startswith("-", self.place)
                and self.text[self.place + 1 : self.place + 2] != "]"
            ):
                self.place += 1
                high = self._character()
            ranges.append((low, high))
        return [Characters(_merged(ranges, is_other=is_other))] if ranges else []

    def _character(self) -> int:
        character = self.text[self.place : self.place + 1]
        if not character:
            raise self._wrong("Unexpected end of input")
        self.place += 1
        if character != "\\":
            return ord(character)
        escape = self.text[self.place : self.place + 1]
        if escape in _ESCAPES:
            self.place += 1
            return ord(_ESCAPES[escape])
        digits = self.text[self.place + 1 : self.place + 1 + _DIGITS.get(escape, 0)]
        if not digits or not re.fullmatch(rf"[0-9a-fA-F]{{{_DIGITS[escape]}}}", digits):
            raise self._wrong(f"Invalid escape sequence \\{escape}")
        self.place += 1 + len(digits)
        return int(digits, 16)

    def _token(self, found: re.Match[str]) -> OneToken:
        token = int(found[2]) if found[2] else self.token_named(f"<{found[3]}>")
        if token is None:
            raise NotationError(f"'<{found[3]}>' is no token of this model")
        return OneToken(token, is_other=bool(found[1]))

    def _times(self) -> tuple[int, int | None] | None:
        character = self.text[self.place : self.place + 1]
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(character)
        if simple is not None:
            self.place += 1
            return simple
        if character != "{":
            return None
        found = _TIMES.match(self.text, self.place)
        if found is None:
            raise self._wrong("Expected {least} or {least,most}")
        self.place = found.end()
        least = int(found[1])
        most = int(found[3]) if found[3] else None if found[2] else least
        if most is not None and most < least:
            raise self._wrong(f"{{{least},{most}}} repeats less than nothing")
        return least, most

    def _repeated(self, item: Sequence_, least: int, most: int | None) -> Sequence_:
        """Return symbols so many times, by rules as llama.cpp makes them: S' ::= S S' | nothing."""
        if len(item) > 1 and (least, most) != (0, 1):
            item = [self._new([item])]
        self.n_symbols += least if most is None else most
        if self.n_symbols > _MOST_SYMBOLS:
            raise NotationError("it is too large: repeat less")
        rest: Sequence_ = []
        if most is None:
            again = self._new([])
            self.made[again] = [[*item, again], []]
            rest = [again]
        for _ in range(0 if most is None else most - least):
            rest = [self._new([[*item, *rest], []])]
        return [*(item * least), *rest]

    def _named(self, name: str) -> int:
        if name not in self.names:
            self.made.append(None)
            self.names[name] = len(self.made) - 1
        return self.names[name]

    def _new(self, rule: Rule) -> int:
        self.made.append(rule)
        return len(self.made) - 1

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.place)
        self.place = self.place if found is None else found.end()

    def _ahead(self, text: str) -> bool:
        found = self.text.startswith(text, self.place)
        self.place += len(text) if found else 0
        return found

    def _wrong(self, what: str) -> NotationError:
        line = self.text.count("\n", 0, self.place) + 1
        shown = self.text[self.place : self.place + 20].split("\n")[0]
        return NotationError(f"{what} at line {line}, before {shown!r}")


def _merged(ranges: list[tuple[int, int]], *, is_other: bool) -> Ranges:
    """Return ranges in order that do not meet, or with `is_other` those between them; no NUL."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(each for each in ranges if each[0] <= each[1]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    if is_other:
        bounds = [-1, *(code for each in merged for code in each), _LAST + 1]
        merged = [(low + 1, high - 1) for low, high in zip(bounds[::2], bounds[1::2], strict=True)]
    return tuple((max(low, 1), min(high, _LAST)) for low, high in merged if high >= max(low, 1))


# -- left recursion --------------------------------------------------------------------------------


def nullable(rules: list[Rule]) -> list[bool]:
    """Return which rules may be empty."""
    found = [False] * len(rules)
    users: list[list[tuple[int, int]]] = [[] for _ in rules]
    missing: dict[tuple[int, int], int] = {}
    ready: list[int] = []
    for number, rule in enumerate(rules):
        for place, symbols in enumerate(rule):
            if any(not isinstance(symbol, int) for symbol in symbols):
                continue
            missing[number, place] = len(symbols)
            for symbol in symbols:
                users[symbol].append((number, place))  # type: ignore[index]
            if not symbols:
                ready.append(number)
    while ready:
        number = ready.pop()
        if found[number]:
            continue
        found[number] = True
        for user in users[number]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user[0])
    return found


def _first_rules(symbols: Sequence_, empty: list[bool]) -> Iterator[tuple[int, Reference]]:
    """Yield the rules that an alternative may begin with, and their places in it."""
    for place, symbol in enumerate(symbols):
        if not isinstance(symbol, int):
            return
        yield place, symbol
        if not empty[symbol]:
            return


def _groups(rules: list[Rule], empty: list[bool]) -> list[list[int]]:
    """Return the groups of rules that may begin with one another (Tarjan's algorithm)."""
    edges = [sorted({s for a in rule for _, s in _first_rules(a, empty)}) for rule in rules]
    order: dict[int, int] = {}
    low, stack, on_stack = [0] * len(rules), list[int](), [False] * len(rules)
    groups: list[list[int]] = []
    for root in range(len(rules)):
        if root in order:
            continue
        ahead = [(root, 0)]
        while ahead:
            rule, place = ahead.pop()
            if not place:
                order[rule] = low[rule] = len(order)
                stack.append(rule)
                on_stack[rule] = True
            elif on_stack[edges[rule][place - 1]]:
                low[rule] = min(low[rule], low[edges[rule][place - 1]])
            if place < len(edges[rule]):
                ahead.append((rule, place + 1))
                if (below := edges[rule][place]) not in order:
                    ahead.append((below, 0))
                continue
            if low[rule] == order[rule]:
                group = list[int]()
                while not group or group[-1] != rule:
                    group.append(stack.pop())
                    on_stack[group[-1]] = False
                if len(group) > 1 or rule in edges[rule]:
                    groups.append(group)
    return groups


def _without_left_recursion(rules: list[Rule]) -> list[Rule]:
    """Return rules of the same texts, none of which begins with itself and goes on behind that.

    Of `a ::= a x | y` is made `a ::= y rest` and `rest ::= x rest | nothing`, and in the same way
    of rules that lead to one another.
    """
    rules = list(rules)
    for group in _groups(rules, nullable(rules)):
        if _grows(rules, group):
            _turn_around(rules, group)
    for group in _groups(rules, nullable(rules)):
        if _grows(rules, group):
            raise NotationError("a rule begins with itself, behind rules that may be empty")
    return rules


def _grows(rules: list[Rule], group: list[int]) -> bool:
    """Whether something follows a rule of the group if another one begins with it."""
    empty, members = nullable(rules), set(group)
    return any(
        symbol in members and place + 1 < len(symbols)
        for number in group
        for symbols in rules[number]
        for place, symbol in _first_rules(symbols, empty)
    )


def _turn_around(rules: list[Rule], group: list[int]) -> None:
    members = set(group)
    if len(group) ** 2 > _MOST_SYMBOLS:
        raise NotationError("too many rules begin with one another")
    begun: list[tuple[int, Sequence_]] = []  # a rule, and an alternative that begins otherwise
    longer: dict[int, list[tuple[int, Sequence_]]] = {}  # by rule: which ones it begins, and then
    for number in group:
        for symbols in rules[number]:
            if symbols and symbols[0] in members:
                longer.setdefault(symbols[0], []).append((number, symbols[1:]))
            else:
                begun.append((number, symbols))
    for wanted in group:
        rest = {each: len(rules) + place for place, each in enumerate(group)}
        rules += [
            [[*more, rest[user]] for user, more in longer.get(each, ())]
            + ([[]] if each == wanted else [])
            for each in group
        ]
        rules[wanted] = [[*symbols, rest[number]] for number, symbols in begun]
