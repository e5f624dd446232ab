"""The options of one drafter expression, read by type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.sampling import unknown_option

__all__ = ["ExpressionOptions"]


class ExpressionOptions:
    """Reads the options of one expression by type, and refuses those nobody asked for.

    `known` are the names it may have, `n_arguments` its most unnamed arguments (None: any number). Only a `counted`
    expression's arguments may carry numbers after @. For a drafter's expression all three are its method's
    (`methods.options_of`).
    """

    def __init__(
        self, expression: Expression, known: Sequence[str], n_arguments: int | None, *, counted: bool = False
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
            raise OptionError(f"{expression}: {self._name} takes {n_arguments} unnamed arguments at most")

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
            raise OptionError(f"{self._name}: {name} is {text!r}, which is not a whole number") from None

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
            raise unknown_option(text, allowed, f"{self._name}: {name}")
        return text

    def _refuse_counts(self, expressions: Iterable[Expression]) -> None:
        for one in expressions:
            if one.count is not None:
                raise OptionError(
                    f"{one}: @{one.count} says how many tokens a part of a relay drafts, as in "
                    "relay(draft(a.gguf)@2, prompt-lookup@3); it means nothing here"
                )
