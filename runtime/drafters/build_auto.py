"""Builds `auto(a, b, ...)`, and says what bare `auto` chooses from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.bindings.mtp_context import can_draft_nextn
from specrun.runtime.drafters.auto import AutoDrafter
from specrun.runtime.drafters.choice_log import read_choice_logs
from specrun.runtime.drafters.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.members import combined
from specrun.runtime.methods import options_of

__all__ = ["auto_expression", "build_auto"]

_WITHOUT_MODEL = ("prompt-lookup", "lookahead")
_NONE = Expression("none")


def auto_expression(draft: str) -> str:
    """Return what to choose from by default, beside `none`: a draft model's drafts and what needs no model."""
    return f"auto({', '.join([draft, *_WITHOUT_MODEL])})"


def build_auto(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `auto(a, b, replay=FILE)`; plain decoding is always one of the choices."""
    options = options_of(expression)
    replay = options.optional("replay")
    logs = read_choice_logs(Path(replay).expanduser()) if replay is not None else []
    arms = list(expression.arguments) or _default_arms(environment)
    if _NONE not in (Expression(arm.atom) if arm.atom == "none" else arm for arm in arms):
        arms.append(_NONE)
    _refuse_twins(expression, arms)
    return combined(
        str(expression),
        build_parts(arms, environment, build),
        lambda members: AutoDrafter(
            members, replay=logs, clock=environment.clock, sizes=[_size(arm) for arm in arms], name=str(expression)
        ),
    )


def _default_arms(environment: DraftEnvironment) -> list[Expression]:
    draft = [Expression("draft")] if "draft" in (environment.default_files or {}) else []
    blocks = [Expression("mtp")] if can_draft_nextn(environment.target) else []
    return [*draft, *blocks, *map(Expression, _WITHOUT_MODEL)]


def _size(expression: Expression) -> int:
    """Return of how many parts an expression is made."""
    return 1 + sum(map(_size, expression.arguments))


def _refuse_twins(expression: Expression, arms: Sequence[Expression]) -> None:
    names = [str(arm) for arm in arms]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"{expression}: {name} stands there twice: auto would measure the same thing twice")
