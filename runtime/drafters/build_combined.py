"""Builds the combinators whose members depend on each other: `cascade(a, b)`, `relay(a@k, b@m)`, `ouroboros(a)`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specrun.bindings.context import MAX_SEQUENCES, Context
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.build_draft import ChainOptions, chain_options, draft_context_options, open_draft_model
from specrun.runtime.drafters.cascade import CascadeDrafter
from specrun.runtime.drafters.draft_model_target import JOINED_TOKENS, DraftModelTarget
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, build_parts, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.members import close_all
from specrun.runtime.drafters.ngram_pool import MAX_NGRAM
from specrun.runtime.drafters.ngram_store import open_store
from specrun.runtime.drafters.ouroboros import OuroborosDrafter
from specrun.runtime.drafters.phrases import PhraseDrafter
from specrun.runtime.drafters.relay import RelayDrafter
from specrun.runtime.methods import TREE_OPTIONS, find_method, options_of
from specrun.runtime.planning.window_guard import WindowGuard

__all__ = ["build_cascade", "build_ouroboros", "build_relay"]

_PER_KEY, _MAX_KEYS = 16, 16384


def build_cascade(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `cascade(draft(a.gguf, n=5), b, rounds=0)`: b drafts for the draft model."""
    options = options_of(expression)
    if len(expression.arguments) != 2:
        raise OptionError(f"{expression}: a cascade has two parts, as in cascade(draft(a.gguf, n=5), prompt-lookup)")
    outer, inner = expression.arguments
    rounds = options.integer("rounds", 0)
    return _cascade(expression, outer, environment, lambda within: build(inner, within), rounds)


def _cascade(
    expression: Expression,
    outer: Expression,
    environment: DraftEnvironment,
    build_inner: Callable[[DraftEnvironment], Drafter],
    max_rounds: int,
) -> CascadeDrafter:
    """Open the draft model of a cascade, and what drafts for it; for that one, the draft model is the target."""
    chain = _cascade_chain(outer, expression)
    model = open_draft_model(file_of(outer, environment), environment)
    drafter: Drafter | None = None
    context: Context | None = None
    try:
        drafter = build_inner(dataclasses.replace(environment, target=model))
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
            max_rounds=max_rounds,
            name=str(expression),
        )
    except BaseException:
        for one in (drafter, context, model):
            if one is not None:
                one.close()
        raise


def build_ouroboros(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `ouroboros(draft(a.gguf, n=5), phrases=3, length=4, pool=FILE)`."""
    options = options_of(expression)
    count, length = options.integer("phrases", 3), options.integer("length", 4)
    if not (1 <= count <= MAX_SEQUENCES and 1 <= length < MAX_NGRAM):
        raise OptionError(
            f"{expression}: give 1 to {MAX_SEQUENCES} phrases of length 1 to {MAX_NGRAM - 1}, not {count} of {length}"
        )
    file = options.optional("pool")
    keep = options.choice("save", ["yes", "no"], "yes") == "yes"
    if file is None and not keep:
        raise OptionError(f"{expression}: save=no is about a pool's file: name it with pool=FILE")
    store = open_store(
        None if file is None else Path(file).expanduser(),
        environment.target.vocabulary,
        n=length + 1,
        per_key=_PER_KEY,
        max_keys=_MAX_KEYS,
        keep=keep,
    )
    outer = expression.arguments[0] if expression.arguments else Expression("draft")
    draft = _cascade(expression, outer, environment, lambda within: PhraseDrafter(store, count=count, length=length), 0)
    try:
        _require_room(expression, draft.max_nodes + count * length, environment)
        guard = WindowGuard(environment.curve)
        return OuroborosDrafter(draft, store, count=count, length=length, guard=guard, name=str(expression))
    except BaseException:
        draft.close()
        raise


def _require_room(expression: Expression, nodes: int, environment: DraftEnvironment) -> None:
    if nodes + 1 > environment.context.n_batch:
        raise OptionError(
            f"{expression} evaluates up to {nodes + 1} tokens at once, which do not fit a batch of "
            f"{environment.context.n_batch}: use fewer or shorter phrases, or raise the batch size (-b)"
        )


def _cascade_chain(outer: Expression, whole: Expression) -> ChainOptions:
    if outer.atom != "draft":
        raise OptionError(
            f"{whole}: the first part is a draft model that decodes speculatively itself, as in "
            f"{whole.atom}(draft(a.gguf, n=5){', prompt-lookup' if whole.atom == 'cascade' else ''})"
        )
    trees = {name for name, _ in outer.options}.intersection(TREE_OPTIONS)
    if trees:
        raise OptionError(f"{whole}: {whole.atom} drafts chains: leave out {', '.join(sorted(trees))}")
    chain = chain_options(outer)
    if chain.adaptive_exit is not None:
        raise OptionError(f"{outer}: p_min=adaptive is for draft(...) on its own; give a fixed p_min here")
    return chain


def build_relay(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `relay(draft(a.gguf)@2, prompt-lookup@3)`: each part goes on below the one before it."""
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
    if part.count is None or not find_method(part.atom).counted_by_n or given & {"n", *TREE_OPTIONS}:
        return dataclasses.replace(part, count=None)
    options = (*part.options, ("n", Expression(str(part.count))))
    return dataclasses.replace(part, options=options, count=None, is_call=True)
