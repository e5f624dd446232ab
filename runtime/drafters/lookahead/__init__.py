"""Lookahead and Jacobi decoding (Fu et al. 2024; Santilli et al. 2023): n-grams from the target
itself."""

from specrun.runtime.drafters.lookahead.guesses import (
    Guesses,
    LatestGuesses,
    MatchAcceptance,
    PlannedGuesses,
    continuations,
)
from specrun.runtime.drafters.lookahead.lookahead import JacobiDrafter, LookaheadDrafter
from specrun.runtime.drafters.lookahead.ngram_pool import MAX_NGRAM, NgramPool
from specrun.runtime.drafters.lookahead.plan import (
    WindowGuard,
    guessed_tokens,
    plan_lookahead,
    step_compression,
)
from specrun.runtime.drafters.lookahead.pool_store import (
    NgramStore,
    load_pool,
    open_store,
    save_pool,
)
from specrun.runtime.drafters.lookahead.window import LookaheadWindow, window_leaves, window_nodes

__all__ = [
    "MAX_NGRAM",
    "Guesses",
    "JacobiDrafter",
    "LatestGuesses",
    "LookaheadDrafter",
    "LookaheadWindow",
    "MatchAcceptance",
    "NgramPool",
    "NgramStore",
    "PlannedGuesses",
    "WindowGuard",
    "continuations",
    "guessed_tokens",
    "load_pool",
    "open_store",
    "plan_lookahead",
    "save_pool",
    "step_compression",
    "window_leaves",
    "window_nodes",
]
