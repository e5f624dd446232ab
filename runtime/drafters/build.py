"""From a drafter expression to a drafter: finds the method, imports its module, calls its builder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, NoDrafter
from specrun.runtime.drafters.ensemble import EnsembleDrafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts
from specrun.runtime.drafters.expression import Expression, parse_expression
from specrun.runtime.drafters.members import close_all
from specrun.runtime.methods import Method, find_method
from specrun.runtime.pairing import check_rollback, check_verifiable

__all__ = ["Builder", "build_drafter", "build_ensemble", "build_none", "load_builder"]

Builder = Callable[[Expression, DraftEnvironment, BuildPart], Drafter]
"""Builds an expression of one method; combinators build their members with the third argument."""


def build_drafter(text: str, environment: DraftEnvironment) -> Drafter:
    """Return the drafter that an expression describes.

    Raises `OptionError` for an expression or option that makes no sense, `PairError` for a model that does
    not fit the target, `ModelError` for a file that cannot be used.
    """
    expression = parse_expression(text)
    if expression.count is not None:
        raise OptionError(f"{expression}: @{expression.count} says how many tokens a part of relay(...) drafts")
    drafter = _build(expression, environment)
    try:
        check_verifiable(environment.target, drafter.name, drafter.max_leaves)
    except BaseException:
        drafter.close()
        raise
    return drafter


def load_builder(method: Method) -> Builder:
    """Import the module of a method and return its builder."""
    return cast("Builder", getattr(importlib.import_module(method.module), method.builder_name))


def _build(expression: Expression, environment: DraftEnvironment) -> Drafter:
    method = find_method(expression.atom)
    if expression.atom != "none":
        check_rollback(environment.target)
    method.read(expression)  # refuses what the method does not take, before anything is loaded
    return load_builder(method)(expression, environment, _build)


def build_none(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `none`: plain decoding."""
    return NoDrafter()


def build_ensemble(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `ensemble(a, b, ...)`."""
    members = build_parts(expression.arguments, environment, build)
    try:
        return EnsembleDrafter(members, name=str(expression))
    except BaseException:
        close_all(members)
        raise
