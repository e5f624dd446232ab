"""A law of which only the best words are known: what a head names on its device, without its whole row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specrun.runtime.law import FloatArray, IdArray, Law

__all__ = ["RankedLaw"]


class RankedLaw(Law):
    """Words in order, the most likely first, with their log-probabilities in nats, both [ranks].

    Trees of favourites ask for `best` only, which costs no sorting. As a law it is that of these words alone,
    renormalised and in the order of their ids, worked out when it is first read.
    """

    __slots__ = ("_best", "_log_probs", "_sorted", "_words")
    _words: npt.NDArray[np.int32]
    _log_probs: npt.NDArray[np.float32]
    _best: list[tuple[int, float]]  # missing until it is needed
    _sorted: Law  # missing until it is needed

    def __init__(self, words: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> None:
        object.__setattr__(self, "_words", words)
        object.__setattr__(self, "_log_probs", log_probs)

    @classmethod
    def of_rows(cls, words: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> list[RankedLaw]:
        """Return the laws of n rows, both [n, ranks], their probabilities worked out at once."""
        laws = [cls(row, values) for row, values in zip(words, log_probs, strict=True)]
        probs = np.exp(log_probs, dtype=np.float64).tolist()
        for law, row, values in zip(laws, words.tolist(), probs, strict=True):
            object.__setattr__(law, "_best", _without_zeros(row, values))
        return laws

    def best(self, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely words with their probabilities in the whole law, none of zero."""
        try:
            return self._best[:count]
        except AttributeError:
            probs = np.exp(self._log_probs[:count], dtype=np.float64).tolist()
            return _without_zeros(self._words[:count].tolist(), probs)

    @property
    def most_likely(self) -> tuple[int, float]:
        """The best word with its probability in the whole law."""
        best = self.best(1)
        return best[0] if best else super().most_likely

    @property
    def probs(self) -> FloatArray:
        """The probabilities of the words, by id."""
        return self._by_id.probs

    @property
    def ids(self) -> IdArray | None:
        """The words by id."""
        return self._by_id.ids

    @property
    def _by_id(self) -> Law:
        try:
            return self._sorted
        except AttributeError:
            order = np.argsort(self._words)
            weights = np.exp(self._log_probs[order], dtype=np.float64)
            law = Law.normalised(weights, self._words[order].astype(np.intp))
            object.__setattr__(self, "_sorted", law)
            return law


def _without_zeros(words: list[int], probs: list[float]) -> list[tuple[int, float]]:
    return [(word, prob) for word, prob in zip(words, probs, strict=True) if prob > 0.0]
