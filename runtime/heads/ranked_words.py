"""The best words of each row of logits with their log-probabilities, found where the logits are computed.

Only a few numbers of each row leave the device: top-k and log-sum-exp are part of a head's graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.graph import Graph, GraphBuilder, Tensor

__all__ = ["RankedWords", "add_ranking", "ranked_words", "words_by_rank"]


@dataclass(frozen=True, slots=True)
class RankedWords:
    """What a head says after n rows: `words` and natural `log_probs`, both [n, ranks], the most likely first."""

    words: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(builder: GraphBuilder, logits: Tensor, ranks: int, *, probabilities: bool = True) -> None:
    """Let a graph return what `ranked_words`, or without `probabilities` only `words_by_rank`, reads.

    The logits are (words, n), and so many of each row are returned.
    """
    words, values = builder.best(logits, ranks)
    builder.output("words", words)
    if probabilities:
        total = builder.log_sum_exp(logits, values if ranks == 1 else builder.columns(values, 0, 1))
        builder.output("log_probs", builder.sub(values, total))


def words_by_rank(graph: Graph, n: int) -> npt.NDArray[np.int32]:
    """Return the words [n, ranks] of the first n rows of a graph that has been computed, the most likely first."""
    return graph.read("words")[:n].astype(np.int32, copy=False)


def ranked_words(graph: Graph, n: int) -> RankedWords:
    """Return the words of the first n rows with their log-probabilities, the most likely first."""
    return RankedWords(words_by_rank(graph, n), graph.read("log_probs")[:n].astype(np.float32, copy=False))
