"""The drafter language: `draft(a.gguf, n=5)`, `cascade(draft, prompt-lookup)`, `relay(a@2, b@3)`.

    expression = atom [ "(" [ argument { "," argument } ] ")" ] [ "@" number ]
    argument   = [ name "=" ] expression
    atom       = quoted text, or any text without , ( ) @ = quotes

`parse_expression` knows no drafters: what a name means, and which arguments it takes, its row of
`methods.METHODS` says. A builder reads the options by type (`ExpressionOptions`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.sampling import unknown_name, unknown_option

_TOKEN = re.compile(
    r"""\s*(?:"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'"""
    r"""|(?P<sign>[(),@=])|(?P<atom>[^\s(),@='"]+))"""
)
_MAX_DEPTH = 16
_MAX_COUNT_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Expression:
    """A name or value with its arguments; `count` is the number after "@", if any.

    `is_call` tells `a()` from `a`.
    """

    atom: str
    arguments: tuple[Expression, ...] = ()
    options: tuple[tuple[str, Expression], ...] = ()
    count: int | None = None
    is_call: bool = False

    def __str__(self) -> str:
        named = (f"{_atom(name)}={value}" for name, value in self.options)
        inner = [*map(str, self.arguments), *named]
        call = f"({', '.join(inner)})" if self.is_call else ""
        return f"{_atom(self.atom)}{call}" + (f"@{self.count}" if self.count is not None else "")


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[^\s(),@='\"]+", text) else quoted(text)


def quoted(text: str) -> str:
    """Return a path or value in quotes, safe inside an expression."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def parse_expression(text: str) -> Expression:
    """Return the parsed expression; raises `OptionError` that shows where it went wrong."""
    parser = _Parser(text)
    expression = parser.expression(0)
    parser.expect_end()
    return expression


def short_label(expression: Expression) -> str:
    """Return the expression with files by their name alone: paths would widen every table."""

    def short(expression: Expression) -> Expression:
        atom = expression.atom
        if atom.endswith((".gguf", ".pool")) or "/" in atom:
            atom = Path(atom).name
        arguments = tuple(map(short, expression.arguments))
        options = tuple((name, short(value)) for name, value in expression.options)
        return replace(expression, atom=atom, arguments=arguments, options=options)

    return str(short(expression))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while self._text[position:].strip():
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error("a quote is not closed", position)
            kind = match.lastgroup or ""
            value = match[kind]
            if kind == "double":
                value = re.sub(r"\\(.)", r"\1", value)
            self._tokens.append(("sign" if kind == "sign" else "atom", value, match.start(kind)))
            position = match.end()
        self._next = 0

    def expression(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise self._error(f"more than {_MAX_DEPTH} levels of parentheses", self._position())
        kind, atom, position = self._take("a name or a file is missing")
        if kind != "atom":
            raise self._error(f"a name or a file is missing before {atom!r}", position)
        arguments: list[Expression] = []
        options: list[tuple[str, Expression]] = []
        is_call = self._skip("(")
        if is_call and not self._skip(")"):
            while True:
                self._argument(arguments, options, depth)
                if self._skip(")"):
                    break
                if not self._skip(","):
                    problem = "a comma or a closing parenthesis is missing"
                    raise self._error(problem, self._position())
        count = self._count() if self._skip("@") else None
        return Expression(atom, tuple(arguments), tuple(options), count, is_call)

    def _argument(
        self, arguments: list[Expression], options: list[tuple[str, Expression]], depth: int
    ) -> None:
        ahead = self._tokens[self._next : self._next + 2]
        if len(ahead) == 2 and ahead[0][0] == "atom" and ahead[1][:2] == ("sign", "="):
            self._next += 2
            if any(name == ahead[0][1] for name, _ in options):
                raise self._error(f"{ahead[0][1]} is given twice", ahead[0][2])
            options.append((ahead[0][1], self.expression(depth + 1)))
        elif options:
            problem = "an argument without a name follows one with a name"
            raise self._error(problem, self._position())
        else:
            arguments.append(self.expression(depth + 1))

    def _count(self) -> int:
        _, value, position = self._take("a number is missing after @")
        if not value.isdecimal() or len(value) > _MAX_COUNT_DIGITS or int(value) < 1:
            raise self._error(f"{value[:20]!r} after @ is not a positive number", position)
        return int(value)

    def expect_end(self) -> None:
        if self._next < len(self._tokens):
            raise self._error(f"unexpected {self._tokens[self._next][1]!r}", self._position())

    def _take(self, problem: str) -> tuple[str, str, int]:
        if self._next >= len(self._tokens):
            raise self._error(problem, len(self._text))
        self._next += 1
        return self._tokens[self._next - 1]

    def _skip(self, sign: str) -> bool:
        found = self._next < len(self._tokens) and self._tokens[self._next][:2] == ("sign", sign)
        self._next += found
        return found

    def _position(self) -> int:
        return self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._text)

    def _error(self, problem: str, position: int) -> OptionError:
        return OptionError(f"drafter {self._text!r}: {problem} (at character {position + 1})")


class ExpressionOptions:
    """Reads the options of one expression by type, and refuses those nobody asked for.

    `known` are the names it may have, `n_arguments` its most unnamed arguments (None: any number).
    Only a `counted` expression's arguments may carry numbers after @. For a drafter's expression
    all three are its method's (`methods.options_of`).
    """

    def __init__(
        self,
        expression: Expression,
        known: Sequence[str],
        n_arguments: int | None,
        *,
        counted: bool = False,
    ) -> None:
        self._name = expression.atom
        self._values = dict(expression.options)
        for name in self._values:
            if name not in known:
                raise unknown_option(name, list(known), self._name)
        self._refuse_counts(self._values.values())
        if not counted:
            self._refuse_counts(expression.arguments)
        if n_arguments is not None and len(expression.arguments) > n_arguments:
            limit = f"{n_arguments} unnamed arguments at most"
            raise OptionError(f"{expression}: {self._name} takes {limit}")

    def integer(self, name: str, default: int) -> int:
        """Return a whole number."""
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """Return a whole number, None where it is not given."""
        text = self.optional(name)
        if text is None:
            return None
        try:
            return int(text)
        except ValueError:
            problem = f"{name} is {text!r}, which is not a whole number"
            raise OptionError(f"{self._name}: {problem}") from None

    def length(self, name: str) -> int | None:
        """Return a whole number of tokens, None where it is "auto" or not given."""
        return None if self.is_auto(name) else self.optional_integer(name)

    def is_auto(self, name: str) -> bool:
        """Whether it is left to the drafter by name, as in n=auto."""
        return self.optional(name) == "auto"

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        text = self.text(name, str(default))
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{self._name}: {name} is {text!r}, which is not a number") from None

    def text(self, name: str, default: str) -> str:
        """Return the text of an option."""
        value = self.optional(name)
        return default if value is None else value

    def optional(self, name: str) -> str | None:
        """Return the text of an option, None where it is not given."""
        return self._values[name].atom if name in self._values else None

    def expression(self, name: str) -> Expression | None:
        """Return an option that may have arguments of its own, None where it is not given."""
        return self._values.get(name)

    def choice(self, name: str, allowed: list[str], default: str) -> str:
        """Return one of the allowed words."""
        text = self.text(name, default)
        if text not in allowed:
            raise unknown_name(text, allowed, f"{name} of {self._name} called")
        return text

    def _refuse_counts(self, expressions: Iterable[Expression]) -> None:
        for expression in expressions:
            if expression.count is not None:
                meaning = "says how many tokens a part of a relay drafts"
                example = "as in relay(draft(a.gguf)@2, prompt-lookup@3); it means nothing here"
                raise OptionError(f"{expression}: @{expression.count} {meaning}, {example}")
