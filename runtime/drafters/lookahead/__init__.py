"""Lookahead decoding (Fu et al. 2024) and Jacobi decoding (Santilli et al. 2023)."""

from specrun.runtime.drafters.lookahead.guesses import (
    Guesses,
    LatestGuesses,
    MatchAcceptance,
    PlannedGuesses,
    add_phrases,
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
from specrun.runtime.drafters.lookahead.pool_store import NgramStore, load_pool, save_pool
from specrun.runtime.drafters.lookahead.window import LookaheadWindow, window_leaves, window_nodes
