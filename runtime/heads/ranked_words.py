"""The best words of each row of logits with their log-probabilities, found where the logits are computed.

Only a few numbers of each row leave the device: top-k and log-sum-exp are part of a head's graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.graph import GraphBuilder, Tensor

__all__ = ["RankedWords", "add_ranking", "ranked_words"]


@dataclass(frozen=True, slots=True)
class RankedWords:
    """What a head says after n rows: `words` and natural `log_probs`, both [n, ranks], the most likely first."""

    words: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(builder: GraphBuilder, logits: Tensor, ranks: int) -> None:
    """Let a graph return what `ranked_words` reads, for logits (words, n)."""
    best = builder.top_k(logits, ranks)
    builder.output("words", best)
    builder.output("values", builder.pick(logits, best, ranks))
    builder.output("total", builder.log_sum_exp(logits))


def ranked_words(found: Mapping[str, npt.NDArray[np.generic]], n: int) -> RankedWords:
    """Return the first n rows of what such a graph has found, in order: ggml leaves the order of a top-k open."""
    values = found["values"][:n].astype(np.float32, copy=False)
    order = np.argsort(-values, axis=1, kind="stable")
    words = found["words"][:n].astype(np.int32, copy=False)
    total = found["total"][:n].astype(np.float32, copy=False)
    return RankedWords(np.take_along_axis(words, order, 1), np.take_along_axis(values, order, 1) - total)
