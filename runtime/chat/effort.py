"""How much a model is to think: one wish, in the variables that a chat template reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import TemplateError

if TYPE_CHECKING:
    from specrun.runtime.chat.template import ChatTemplate

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words for how much is thought; "none" turns thinking off."""
_USUAL = ("low", "medium", "high")
_OFF = ("none", "no_think", "off", "disabled", "minimal")  # as templates call it
_BUDGETS = {"minimal": 512, "low": 1024, "medium": 4096}  # tokens; above them there is no bound
_UNBOUND = -1
_SWITCHES = ("enable_thinking", "thinking", "think", "reasoning")
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_HELLO = [{"role": "user", "content": "Hello."}]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a client wants the model to think; None: as the model does.

    `is_on` turns thinking on or off, `level` is a word of `LEVELS` or of the model's own, `budget`
    a number of tokens.
    """

    is_on: bool | None = None
    level: str | None = None
    budget: int | None = None

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to think at all."""
        if self.is_on is not None:
            return self.is_on
        if self.level is not None:
            return self.level not in _OFF[:-1]
        return None if self.budget is None else self.budget > 0

    @property
    def word(self) -> str | None:
        """The level; that of the budget if only this is known."""
        if self.thinks is False:
            return "none"
        if self.level not in (None, "none") or self.budget is None:
            return self.level
        fitting = (word for word, most in _BUDGETS.items() if self.budget <= most)
        return next(fitting, "high")

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the variables of a template for it; none that the template does not read."""
        if self.thinks is None:
            return {}
        found: dict[str, Any] = {}
        names = template.names
        switches = [name for name in _SWITCHES if name in names]
        found.update(dict.fromkeys(switches, self.thinks))
        if "thinking_mode" in names:
            found["thinking_mode"] = "enabled" if self.thinks else "disabled"
        if "thinking_budget" in names:
            budget = self.budget if self.thinks else 0
            if budget is None and self.word is not None:
                budget = _BUDGETS.get(self.word, _UNBOUND)
            found |= {} if budget is None else {"thinking_budget": budget}
        for name in _EFFORTS:
            if name in names and self.word is not None and (self.thinks or not found):
                word = self._accepted(template, name, found)
                found |= {} if word is None else {name: word}
        return found

    def _accepted(self, template: ChatTemplate, name: str, others: dict[str, Any]) -> str | None:
        """Return the nearest word that a template takes."""
        for word in self._words(template.source):
            try:
                template.render(_HELLO, variables={**others, name: word})
            except TemplateError:
                continue
            return word
        return None

    def _words(self, source: str) -> Iterator[str]:
        """Yield words from the nearest on; unusual ones only if the template names them."""
        assert self.word is not None

        def is_named(word: str) -> bool:
            return any(f"{quote}{word}{quote}" in source for quote in ("'", '"', "`"))

        if self.word == "none":
            yield from filter(is_named, _OFF)
            yield "low"
            return
        if self.word not in LEVELS:  # a word of the model's own
            yield self.word
            return
        place = LEVELS.index(self.word)
        distances = {word: (abs(k - place), -k) for k, word in enumerate(LEVELS)}
        near = sorted(LEVELS[1:], key=distances.__getitem__)
        yield from (word for word in near if word in _USUAL or is_named(word))
