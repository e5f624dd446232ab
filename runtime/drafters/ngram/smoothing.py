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

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specrun.runtime.drafters.ngram.text_counts import Followers
from specrun.runtime.law import FloatArray, IdArray, Law

_NO_IDS = np.zeros(0, np.intp)


class Counts(Protocol):
    """Counts of n-grams: of a growing text or of files."""

    order: int

    def followers(self, context: Sequence[int]) -> Followers:
        """Return the tokens that followed a context, ascending, and how often."""


class NgramLaw:
    """The smoothed law of several counts: `sources` from what says least of the text to most."""

    def __init__(self, sources: Sequence[Counts]) -> None:
        self._sources = sources

    def after(self, tokens: Sequence[int]) -> Law | None:
        """Return the law of the next token, on the tokens that were counted; None without any."""
        ids, probs = _NO_IDS, np.zeros(0)
        for source in self._sources:
            for length in range(min(source.order, len(tokens) + 1)):
                context = tokens[len(tokens) - length :]
                followers, counts = source.followers(context)
                if not len(followers):
                    break  # a longer context was not seen either
                ids, probs = _interpolated(ids, probs, followers, counts)
        return Law(probs, ids) if len(ids) else None


def _interpolated(
    ids: IdArray, probs: FloatArray, followers: IdArray, counts: FloatArray
) -> tuple[IdArray, FloatArray]:
    """Return (c + N P) / (sum c + N) on the tokens of both; relative frequencies without P."""
    if not len(ids):
        return followers, counts / counts.sum()
    n = float(len(followers))
    total = float(counts.sum()) + n
    places = ids.searchsorted(followers)
    known = places < len(ids)
    known[known] = ids[places[known]] == followers[known]
    if not known.all():
        # Only where the longer source has tokens that the shorter one lacks.
        wider = np.union1d(ids, followers)
        spread = np.zeros(len(wider))
        spread[wider.searchsorted(ids)] = probs
        ids, probs, places = wider, spread, wider.searchsorted(followers)
    left = probs * (n / total)
    left[places] += counts / total
    return ids, left
