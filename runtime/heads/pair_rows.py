"""The sizes of a head over pairs, and what it says after them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.runtime.heads.cached_attention import AttentionSizes

__all__ = ["EagleRows", "FloatRows", "PairSizes"]

FloatRows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PairSizes:
    """The sizes of a head: its predicted states, the target's features of a pair, the words it knows, its layer."""

    hidden: int
    features: int
    words: int
    feed_forward: int
    norm_eps: float
    attention: AttentionSizes


@dataclass(frozen=True, slots=True)
class EagleRows:
    """What a head says after n pairs: predicted states [n, hidden] and its best words.

    `words` (of the target) and `log_probs` are [n, ranks], the most likely first; `logits` [n, words of the target]
    where they were asked for: a view, which dies with the head's next evaluation.
    """

    states: FloatRows
    words: npt.NDArray[np.int32]
    log_probs: FloatRows
    logits: FloatRows | None
