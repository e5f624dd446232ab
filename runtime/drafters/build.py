"""Builds drafters from expressions: finds the method, imports its module, calls its builder."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import cast

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.break_even import TimedDrafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.language import (
    TREE_OPTIONS,
    Expression,
    Method,
    find_method,
    parse_expression,
)
from specrun.runtime.models.pairing import check_verifiable
from specrun.runtime.planning import LiveCurve
from specrun.runtime.round.drafter import Drafter, DrafterWeights, NoDrafter, Pace

_FILLING = "specrun.runtime.drafters.combinators.filled"

Builder = Callable[[Expression, DraftEnvironment, BuildPart], DrafterWeights]
"""Builds an expression of one method; combinators build their members with the third argument."""


def build_drafter(text: str, env: DraftEnvironment) -> DrafterWeights:
    """Return the weights of the drafter that an expression describes.

    Building or the first start raises `OptionError` for an expression or option that makes no
    sense, `PairError` for a model that does not fit the target, `ModelError` for a file that cannot
    be used. A start that fails leaves nothing open; the weights stay open until they are closed.
    """
    expression = parse_expression(text)
    if expression.count is not None:
        raise OptionError(
            f"{expression}: @{expression.count} is the number of tokens of a part of relay(...)"
        )
    timed = env
    if env.by_clock and env.costs is None:
        timed = dataclasses.replace(env, learnt=LiveCurve(env.known))
    weights = _build(expression, timed)

    def start() -> Drafter:
        drafter = weights.start()
        drafter.begins_alike |= not env.by_clock
        drafter = _timed(drafter, weights.pace, timed)
        try:
            check_verifiable(env.target, drafter.name, drafter.max_leaves)
        except BaseException:
            drafter.close()
            raise
        return drafter

    return DrafterWeights(weights.name, start, [weights])


def _timed(drafter: Drafter, pace: Pace, env: DraftEnvironment) -> Drafter:
    """Return a drafter whose rounds are timed, as far as its weights allow."""
    if not env.by_clock or pace == "counted":
        return drafter
    has_plan, learnt = pace in ("compared", "greedy"), env.learnt
    if learnt is None and has_plan:
        return drafter  # costs were given: it plans with these
    if learnt is None:
        # Costs that were given are not corrected: the time of rounds is this conversation's own.
        learnt = LiveCurve(env.known)
    elif has_plan and env.meeting is not None:
        # So are shares of evaluations with others. Their first rounds are plain, measured or not.
        learnt = LiveCurve(dataclasses.replace(env.known, spread=()))
    return TimedDrafter(drafter, learnt, env.clock, pace, env.share)


def load_builder(method: Method) -> Builder:
    """Import the module of a method and return its builder."""
    return cast("Builder", getattr(importlib.import_module(method.module), method.builder_name))


def _build(expression: Expression, env: DraftEnvironment) -> DrafterWeights:
    method = find_method(expression.atom)
    # Refuses options that the method does not have, before anything is loaded.
    always = _drafts_always(method, expression, env)
    # Members go on from each other's guesses: none waits for others. Their drafts are as named,
    # but for those of `auto`, of which one drafts a round alone.
    inner = env
    if method.members != 0:
        fills = env.may_fill and method.name == "auto"
        inner = dataclasses.replace(env, meeting=None, may_fill=fills)
    weights = load_builder(method)(expression, inner, _build)
    if always:
        weights.pace = "counted"
    if method.members == 0 and not _is_sized(expression) and env.fills:
        fill: Callable[[DrafterWeights, DraftEnvironment], DrafterWeights]
        fill = importlib.import_module(_FILLING).fill
        return fill(weights, env)
    return weights


def _drafts_always(method: Method, expression: Expression, env: DraftEnvironment) -> bool:
    """Return whether no clock stops the drafter: the option `always`, or a file of the demo.

    The demo shows drafting, though it gains nothing with models of its size.
    """
    options = method.read(expression)
    if "always" not in method.options:
        return False
    always = options.choice("always", ["yes", "no"], "no") == "yes"
    return always or (not expression.arguments and method.name in (env.default_files or {}))


def _is_sized(expression: Expression) -> bool:
    """Return whether an expression sets the length of drafts: then it is no more than that."""
    sizes = {"n", *TREE_OPTIONS}
    return any(name in sizes and value.atom != "auto" for name, value in expression.options)


def build_none(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `none`: plain decoding."""
    return DrafterWeights(NoDrafter.name, NoDrafter)
