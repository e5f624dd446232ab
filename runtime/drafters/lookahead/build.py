"""Builds `lookahead(...)` and `jacobi(...)`, and opens the n-gram pool of an expression."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import CostCurve
from specrun.runtime.drafter import Drafter, DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.lookahead.guesses import Guesses, LatestGuesses, PlannedGuesses
from specrun.runtime.drafters.lookahead.lookahead import JacobiDrafter, LookaheadDrafter
from specrun.runtime.drafters.lookahead.ngram_pool import MAX_NGRAM
from specrun.runtime.drafters.lookahead.plan import WindowGuard, plan_lookahead
from specrun.runtime.drafters.lookahead.pool_store import NgramStore, open_store
from specrun.runtime.drafters.lookahead.window import window_leaves, window_nodes
from specrun.runtime.drafters.paying import pace_of
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of
from specrun.runtime.trees import check_leaves

_NGRAM, _NGRAM_OF_TEXT = 5, 10
_PER_KEY, _MAX_KEYS = 16, 16384
_FEWEST_PATHS = 4
_PLANNED_NODES = 16
_YES_NO = ["yes", "no"]


def build_jacobi(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `jacobi(n=4, until=N, always=no)`."""
    options = options_of(expression)
    n, seed = options.integer("n", 4), options.integer("seed", 0)
    until = options.optional_integer("until")
    _require_room(expression, env, n, 1)
    name, pace = str(expression), pace_of(options)

    def start() -> Drafter:
        return JacobiDrafter(n=n, seed=seed, until=until, name=name)

    start().close()  # refuses what makes no sense
    return DrafterWeights(name, start, pace=pace)


def build_lookahead(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `lookahead(window=15, ngram=5, guesses=15, pool=FILE)`; what is left out is planned.

    The plan reads the target's cost curve, measured by `specrun tune` on this machine or else a
    typical one. A pool with a file is shared by all conversations: each drafts what any of them
    wrote, and they are saved together. Without a file, or with save=no, every conversation fills a
    pool of its own.
    """
    options = options_of(expression)
    given = options.optional_integer("ngram")
    ngram = _NGRAM if given is None else given
    if not 2 <= ngram <= MAX_NGRAM:
        raise OptionError(f"{expression}: ngram is {ngram}: give 2 to {MAX_NGRAM}")
    curve = env.curve
    window, n_guesses = options.optional_integer("window"), options.optional_integer("guesses")
    width = plan_lookahead(curve, ngram).window if window is None else window
    if width < 0 or (n_guesses or 0) < 0:
        problem = "window and guesses count columns and n-grams: give 0 or more"
        raise OptionError(f"{expression}: {problem}")
    if given is None and width == 0 and n_guesses is None:
        # Without a window longer n-grams cost nothing, and tell copies from formulas.
        ngram = _NGRAM_OF_TEXT
    guesses = _guesses(curve, width, ngram, n_guesses)
    nodes = window_nodes(width, ngram) + guesses().max_nodes
    leaves = window_leaves(width, ngram) + guesses().max_leaves
    _require_room(expression, env, nodes, leaves)
    store = open_pool(expression, env, ngram)
    learn_text, seed = options.choice("text", _YES_NO, "yes") == "yes", options.integer("seed", 0)

    def start() -> Drafter:
        return LookaheadDrafter(
            ngram=ngram,
            width=width,
            guesses=guesses(),
            store=store.for_conversation(),
            guard=WindowGuard(curve) if window is None and width else None,
            learn_text=learn_text,
            seed=seed,
            name=str(expression),
        )

    return DrafterWeights(str(expression), start, [store], pace_of(options))


def _guesses(
    curve: CostCurve, width: int, ngram: int, n_guesses: int | None
) -> Callable[[], Guesses]:
    """Return what makes a conversation's guesses: so many, or planned ones."""
    if n_guesses is not None:
        return functools.partial(LatestGuesses, n_guesses, ngram)
    leaves = max(width, _FEWEST_PATHS)
    return functools.partial(PlannedGuesses, curve, max_leaves=leaves, max_nodes=_most_nodes(curve))


def open_pool(expression: Expression, env: DraftEnvironment, ngram: int) -> NgramStore:
    """Return the store of an expression's n-gram pool: its options `pool`, `save` and bounds."""
    options = options_of(expression)
    path = options.optional("pool")
    keep = options.choice("save", _YES_NO, "yes") == "yes"
    if path is None and not keep:
        raise OptionError(f"{expression}: save=no is about a pool's file: name it with pool=FILE")
    return open_store(
        None if path is None else Path(path).expanduser(),
        env.target.vocabulary,
        n=ngram,
        per_key=options.integer("per_key", _PER_KEY),
        max_keys=options.integer("max_keys", _MAX_KEYS),
        keep=keep,
    )


def _most_nodes(curve: CostCurve) -> int:
    """Return how many nodes are worth drafting where every one of them is sure to be accepted."""
    return max(range(1, _PLANNED_NODES + 1), key=lambda n: (n + 1) / curve.seconds(n + 1))


def _require_room(expression: Expression, env: DraftEnvironment, nodes: int, leaves: int) -> None:
    """Raise where no evaluation could hold a proposal of this size."""
    check_leaves(expression, leaves, "lower window or guesses")
    for limit, name, advice in (
        (env.context.n_batch, "a batch", "the batch size (-b)"),
        (env.n_ctx, "a context", "the context size (-c)"),
    ):
        if nodes + 1 > limit:
            raise OptionError(
                f"{expression} evaluates up to {nodes + 1} tokens at once, which do not fit {name} "
                f"of {limit}: lower its sizes, or raise {advice}"
            )
