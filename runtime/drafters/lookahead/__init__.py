"""Lookahead decoding (Fu et al. 2024) and Jacobi decoding (Santilli et al. 2023)."""

from specrun.runtime.drafters.lookahead.drafter import (
    JacobiDrafter,
    LookaheadDrafter,
    LookaheadWindow,
    WindowGuard,
    guessed_tokens,
    planned_width,
    window_leaves,
    window_nodes,
)
from specrun.runtime.drafters.lookahead.pool import (
    GUESS_PRIORS,
    MAX_NGRAM,
    Guesses,
    LatestGuesses,
    NgramPool,
    NgramStore,
    PlannedGuesses,
    add_phrases,
    continuations,
    kind_of,
    load_pool,
    save_pool,
)
