"""The best words of each row of logits with their log-probabilities, found where the logits are computed.

Only a few numbers of each row leave the device: top-k and log-sum-exp are part of a head's graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.ggml.graph import GraphBuilder, Tensor

__all__ = ["RankedWords", "add_ranking", "ranked_words", "words_by_rank"]

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class RankedWords:
    """What a head says after n rows: `words` and natural `log_probs`, both [n, ranks], the most likely first."""

    words: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32]


def add_ranking(builder: GraphBuilder, logits: Tensor, ranks: int, *, probabilities: bool = True) -> None:
    """Let a graph return what `ranked_words`, or without `probabilities` only `words_by_rank`, reads.

    The logits are (words, n), and so many of each row are returned.
    """
    best = builder.top_k(logits, ranks) if ranks > 1 else builder.reshape(builder.argmax(logits), 1, logits.shape[1])
    builder.output("words", best)
    values = builder.pick(logits, best, ranks) if ranks > 1 or probabilities else None
    if values is not None:
        builder.output("values", values)
    if probabilities:
        builder.output("total", builder.log_sum_exp(logits, values if ranks == 1 else None))


def words_by_rank(read: Callable[[str], Array], n: int) -> npt.NDArray[np.int32]:
    """Return the words [n, ranks] of the first n rows, the most likely first: ggml leaves the order of a top-k open.

    `read` is that of a graph that has been computed.
    """
    words = read("words")[:n].astype(np.int32, copy=False)
    return words if words.shape[1] == 1 else words[_order(read("values")[:n].astype(np.float32, copy=False))]


def ranked_words(read: Callable[[str], Array], n: int) -> RankedWords:
    """Return the words of the first n rows with their log-probabilities, the most likely first."""
    words = read("words")[:n].astype(np.int32, copy=False)
    values = read("values")[:n].astype(np.float32, copy=False)
    total = read("total")[:n].astype(np.float32, copy=False)
    if words.shape[1] == 1:
        return RankedWords(words, values - total)
    order = _order(values)
    return RankedWords(words[order], values[order] - total)


def _order(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return where each row's values are, the largest first; indices are several times quicker than take_along_axis."""
    return np.arange(len(values))[:, None], (-values).argsort(axis=1, kind="stable")
