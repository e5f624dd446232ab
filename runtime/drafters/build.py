"""From a drafter expression to a drafter: one builder per name."""

from __future__ import annotations

from collections.abc import Callable

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.build_auto import build_auto
from specrun.runtime.drafters.build_combined import build_cascade, build_ouroboros, build_relay
from specrun.runtime.drafters.build_draft import build_draft
from specrun.runtime.drafters.build_eagle import build_eagle, build_eagle3
from specrun.runtime.drafters.build_hydra import build_hydra
from specrun.runtime.drafters.build_lookahead import build_jacobi, build_lookahead
from specrun.runtime.drafters.build_medusa import build_medusa
from specrun.runtime.drafters.build_mtp import build_mtp
from specrun.runtime.drafters.build_retrieval import build_prompt_lookup, build_rest
from specrun.runtime.drafters.drafter import Drafter, DrafterWeights, NoDrafter
from specrun.runtime.drafters.ensemble import EnsembleDrafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts
from specrun.runtime.drafters.expression import Expression, parse_expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.members import close_all
from specrun.runtime.pairing import check_rollback, check_verifiable
from specrun.runtime.sampling import unknown_option

__all__ = ["build_drafter", "drafter_names"]


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


def drafter_names() -> list[str]:
    """Return the names an expression may begin with."""
    return list(_BUILDERS)


def _started(built: Drafter | DrafterWeights) -> Drafter:
    """Return a drafter that owns its weights, until all builders return weights."""
    if isinstance(built, Drafter):
        return built
    try:
        drafter = built.start()
    except BaseException:
        built.close()
        raise
    close = drafter.close

    def close_all_of_it() -> None:
        try:
            close()
        finally:
            built.close()

    drafter.close = close_all_of_it  # type: ignore[method-assign]
    return drafter


def _build(expression: Expression, environment: DraftEnvironment) -> Drafter:
    builder = _BUILDERS.get(expression.atom)
    if builder is None:
        raise unknown_option(expression.atom, drafter_names(), "the drafter language")
    if expression.atom != "none":
        check_rollback(environment.target)
    return _started(builder(expression, environment, _build))


def _build_none(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    ExpressionOptions(expression, [], 0)
    return NoDrafter()


def _build_ensemble(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    ExpressionOptions(expression, [], len(expression.arguments))
    members = build_parts(expression.arguments, environment, build)
    try:
        return EnsembleDrafter(members, name=str(expression))
    except BaseException:
        close_all(members)
        raise


_BUILDERS: dict[str, Callable[[Expression, DraftEnvironment, BuildPart], Drafter | DrafterWeights]] = {
    "none": _build_none,
    "draft": build_draft,
    "ensemble": _build_ensemble,
    "eagle": build_eagle,
    "eagle3": build_eagle3,
    "medusa": build_medusa,
    "hydra": build_hydra,
    "mtp": build_mtp,
    "jacobi": build_jacobi,
    "lookahead": build_lookahead,
    "cascade": build_cascade,
    "relay": build_relay,
    "ouroboros": build_ouroboros,
    "auto": build_auto,
    "prompt-lookup": build_prompt_lookup,
    "rest": build_rest,
}
