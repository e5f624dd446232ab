"""Mirostat (Basu et al. 2021): truncation that steers the text's surprise to a target, tau bits.

A number mu, twice tau at first, bounds the surprise of the next token; after each token it moves
against the error of that token's surprise. Version 2 (algorithm 2) cuts at mu itself, version 1
(algorithm 1) at the k that Zipf's law expects for it. mu depends on tokens and laws alone, so a
node of a draft tree has one of its own: that of the text down to it.
"""

from __future__ import annotations

import math

import numpy as np

from specrun.runtime.samplers.candidates import Candidates, keep_top_k

_RANKS = 100  # from which version 1 estimates the exponent of Zipf's law; llama.cpp's m


def keep_unsurprising(candidates: Candidates, mu: float) -> Candidates:
    """Return the tokens whose surprise is at most `mu` bits, or else the likeliest (version 2)."""
    values = candidates.values
    # -log2 softmax(x) <= mu, in nats.
    shifted = values - values.max()
    total = math.log(float(np.exp(shifted).sum()))
    kept = shifted >= total - mu * math.log(2.0)
    if not kept.any():
        return candidates.kept(np.array([values.argmax()]))
    return candidates.kept(kept)


def keep_zipf(candidates: Candidates, mu: float, n_vocab: int) -> Candidates:
    """Return the k likeliest, k estimated for an expected surprise of `mu` bits (version 1)."""
    ranked = np.sort(keep_top_k(candidates, _RANKS).values)[::-1]
    if len(ranked) < 2:
        return candidates
    # The slope of log p over log rank, by least squares between neighbours.
    rises = [math.log((rank + 2) / (rank + 1)) for rank in range(len(ranked) - 1)]
    falls = (ranked[:-1] - ranked[1:]).tolist()
    exponent = sum(t * b for t, b in zip(rises, falls, strict=True)) / sum(t * t for t in rises)
    return keep_top_k(candidates, _zipf_k(exponent, mu, n_vocab))


def _zipf_k(exponent: float, mu: float, n_vocab: int) -> int:
    """Return ((e 2^mu) / (1 - n_vocab^-e))^(1/s) with e = s - 1 (equation 2), from 1 to n_vocab.

    Where that is too large for C's int, llama.cpp keeps a single token: here all are kept.
    """
    if exponent <= 0.0:  # a flat row
        return n_vocab
    rest = exponent - 1.0
    try:
        # -expm1(-e log n) / e is log n where e is 0.
        mass = -math.expm1(-rest * math.log(n_vocab)) / rest if rest else math.log(n_vocab)
        k = (2.0**mu / mass) ** (1.0 / exponent)
    except OverflowError:
        return n_vocab
    return max(1, int(min(k, n_vocab)))


def mu_after(mu: float, probability: float, tau: float, eta: float) -> float:
    """Return mu after a token that the truncated law gave this probability."""
    if probability <= 0.0:  # a node that no text reaches: any mu will do
        return mu
    return mu - eta * (-math.log2(probability) - tau)
