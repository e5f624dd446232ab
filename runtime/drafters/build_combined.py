"""Builds the combinators whose members depend on each other: `cascade(a, b)`, `relay(a@k, b@m)`."""

from __future__ import annotations

import dataclasses

from specrun.bindings.context import Context
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.build_draft import ChainOptions, chain_options, draft_context_options, open_draft_model
from specrun.runtime.drafters.cascade import CascadeDrafter
from specrun.runtime.drafters.draft_model_target import JOINED_TOKENS, DraftModelTarget
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.members import close_all
from specrun.runtime.drafters.relay import RelayDrafter

__all__ = ["build_cascade", "build_relay"]

# Drafters of chains, whose own `n` says what @ says in a relay.
_COUNTED = ("draft", "prompt-lookup")
_TREE_OPTIONS = {"tree", "depth", "topk", "nodes"}


def build_cascade(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `cascade(draft(a.gguf, n=5), b, rounds=0)`: b drafts for the draft model."""
    options = ExpressionOptions(expression, ["rounds"], 2)
    if len(expression.arguments) != 2:
        raise OptionError(f"{expression}: a cascade has two parts, as in cascade(draft(a.gguf, n=5), prompt-lookup)")
    outer, inner = expression.arguments
    chain = _cascade_chain(outer, expression)
    model = open_draft_model(file_of(outer, environment), environment)
    drafter: Drafter | None = None
    context: Context | None = None
    try:
        # For the inner drafter, the draft model is the target.
        drafter = build(inner, dataclasses.replace(environment, target=model))
        context = Context(
            model,
            dataclasses.replace(
                draft_context_options(environment.context, model),
                n_sequences=drafter.max_leaves,
                n_outputs=drafter.max_nodes + 1 + JOINED_TOKENS,
            ),
        )
        return CascadeDrafter(
            DraftModelTarget(context, target_vocab_size=environment.target.vocabulary.size),
            drafter,
            num_draft_tokens=chain.n,
            sampling=chain.sampling,
            p_min=chain.p_min,
            max_rounds=options.integer("rounds", 0),
            name=str(expression),
        )
    except BaseException:
        for one in (drafter, context, model):
            if one is not None:
                one.close()
        raise


def _cascade_chain(outer: Expression, whole: Expression) -> ChainOptions:
    if outer.atom != "draft":
        raise OptionError(
            f"{whole}: the first part of a cascade is a draft model that the second drafts for, as in "
            f"cascade(draft(a.gguf, n=5), {outer})"
        )
    trees = _TREE_OPTIONS & {name for name, _ in outer.options}
    if trees:
        raise OptionError(f"{whole}: a cascade drafts chains: leave out {', '.join(sorted(trees))}")
    return chain_options(outer)


def build_relay(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `relay(draft(a.gguf)@2, prompt-lookup@3)`: each part goes on below the one before it."""
    ExpressionOptions(expression, [], len(expression.arguments), counted=True)
    if len(expression.arguments) < 2:
        raise OptionError(f"{expression}: a relay needs at least two parts, as in relay(draft(a.gguf)@2, ...)")
    counts = [part.count for part in expression.arguments]
    members = build_parts([_without_count(part) for part in expression.arguments], environment, build)
    try:
        return RelayDrafter(members, counts, name=str(expression))
    except BaseException:
        close_all(members)
        raise


def _without_count(part: Expression) -> Expression:
    """Return a relay's part with its count as the option `n` where it draws chains of its own length."""
    given = {name for name, _ in part.options}
    if part.count is None or part.atom not in _COUNTED or given & {"n", *_TREE_OPTIONS}:
        return dataclasses.replace(part, count=None)
    options = (*part.options, ("n", Expression(str(part.count))))
    return dataclasses.replace(part, options=options, count=None, is_call=True)
