"""Witten-Bell smoothing (Witten and Bell 1991): counts of n-grams as a law of the next token.

With c(h w) how often token w followed the context h, c(h) = sum_w c(h w) and N(h) how many
different tokens did,

    P(w | h) = (c(h w) + N(h) P(w | h')) / (c(h) + N(h))

where h' is h without its first token (Chen and Goodman 1999, equation 17, the interpolated form of
Jelinek and Mercer): a context in which many things followed leaves more to the shorter one. The
text's own counts are interpolated with those of files in the same way, as if files were a still
shorter context: P(w | nothing) of the text is smoothed by the file's P(w | h), a cache model. At
the bottom are relative frequencies; the law has mass on tokens that were counted, which is enough
to be drawn from.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specrun.runtime.drafters.ngram.text_counts import Followers
from specrun.runtime.law import IdArray, Law

_NO_IDS = np.zeros(0, np.intp)


class Counts(Protocol):
    """Counts of n-grams: of a growing text or of files."""

    order: int

    def followers(self, context: Sequence[int]) -> Followers:
        """Return the tokens that followed a context, ascending, and how often.

        Of the empty context the array of tokens is the same object while they are the same.
        """


class NgramLaw:
    """The smoothed law of several counts: `sources` from what says least of the text to most."""

    def __init__(self, sources: Sequence[Counts]) -> None:
        self._sources = sources
        # The tokens that any source has, and where each source's are among them. They are worked
        # out again when a source has other tokens: most rounds bring none.
        self._known: list[IdArray] = []
        self._ids = _NO_IDS
        self._places: list[IdArray] = []

    def after(self, tokens: Sequence[int]) -> Law | None:
        """Return the law of the next token, on the tokens that were counted; None without any."""
        self._align()
        if not len(self._ids):
            return None
        probs, is_empty = np.zeros(len(self._ids)), True
        for source, all_places in zip(self._sources, self._places, strict=True):
            for length in range(min(source.order, len(tokens) + 1)):
                followers, counts = source.followers(tokens[len(tokens) - length :])
                if not len(followers):
                    break  # a longer context was not seen either
                places = all_places if length == 0 else self._ids.searchsorted(followers)
                total = float(counts.sum())
                if not is_empty:
                    n_different = float(len(followers))
                    total += n_different
                    probs *= n_different / total
                probs[places] += counts / total
                is_empty = False
        return Law(probs, self._ids)

    def _align(self) -> None:
        known = [source.followers(())[0] for source in self._sources]
        if len(known) == len(self._known) and all(map(operator.is_, known, self._known)):
            return
        ids = known[0] if len(known) == 1 else np.unique(np.concatenate([_NO_IDS, *known]))
        self._ids, self._places = ids, [ids.searchsorted(tokens) for tokens in known]
        self._known = known
