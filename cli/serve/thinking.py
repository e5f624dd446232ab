"""How much a client wants the model to think, as each API says it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from specrun.cli.serve.body import checked, one_of, shown, wanted
from specrun.cli.serve.errors import RequestError
from specrun.runtime.chat import LEVELS, Effort, Thoughts

_Thinking = Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
_Tokens = Annotated[int, Meta(ge=0), wanted("a number of tokens")]
_WORDS = f"one of {', '.join(LEVELS)}"


ReasoningFormat = Literal["none", "auto", "deepseek", "deepseek-legacy", "raw", "parsed", "hidden"]
"""The values of `reasoning_format`: llama-server's, and from "raw" on Groq's."""
_PLACES: dict[str, Thoughts] = {"none": "content", "raw": "content", "hidden": "left out"}


class ThinkingFields(Struct):
    """Anthropic's `thinking`, which several vendors' chat completions have, too."""

    type: Annotated[_Thinking, one_of(_Thinking)]
    budget_tokens: Annotated[_Tokens | None, wanted("a number of tokens")] = None
    display: Any = None


class ReasoningFields(Struct):
    """The fields of `reasoning` that are read: OpenAI's and OpenRouter's."""

    effort: Any = None
    enabled: bool | None = None
    max_tokens: Annotated[_Tokens | None, wanted("a number of tokens")] = None
    exclude: bool | None = None


def level_of(value: object, field: str) -> str | None:
    """Return a word for how much is thought; raises `RequestError` for anything else."""
    if value is None:
        return None
    if isinstance(value, str) and value:
        return value.lower() if value.lower() in LEVELS else value
    raise RequestError(f"{field} is {shown(value)}: give {_WORDS}", field)


def effort_of(
    *,
    level: object = None,
    level_field: str = "reasoning_effort",
    reasoning: dict[str, Any] | None = None,
    thinking: dict[str, Any] | None = None,
) -> Effort:
    """Return the effort that the fields of a body ask for; the more particular one counts."""
    given = checked(reasoning or {}, ReasoningFields, "reasoning")
    word = level_of(given.effort, "reasoning.effort") or level_of(level, level_field)
    is_on, budget = given.enabled, given.max_tokens
    if thinking is not None:
        own = checked(thinking, ThinkingFields, "thinking")
        is_on = own.type != "disabled" if is_on is None else is_on
        budget = own.budget_tokens if budget is None else budget
    return Effort(is_on, word, budget)


def thoughts_of(
    form: ReasoningFormat | None,
    include: bool | None,
    *,
    reasoning: dict[str, Any] | None = None,
    thinking: dict[str, Any] | None = None,
) -> Thoughts:
    """Return the place of the reasoning in a reply.

    `form` is `reasoning_format`, `include` is `include_reasoning`. What leaves it out counts most:
    OpenRouter's `exclude`, and Anthropic's `display: omitted`, too.
    """
    is_left_out = include is False or (thinking or {}).get("display") == "omitted"
    if is_left_out or (reasoning or {}).get("exclude") is True:
        return "left out"
    return _PLACES.get(form or "auto", "apart")
