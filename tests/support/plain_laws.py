"""The law of a row by one sort of all of it: what every quicker way must give."""

from __future__ import annotations

import math

import numpy as np

from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.laws.rows import MOST_RANKED


def ranked(values: np.ndarray, *, higher_ids_first: bool = False) -> np.ndarray:
    """The places by value, the highest first; of equals the lower id, unless asked otherwise."""
    ids = np.arange(len(values))
    return np.lexsort((-ids if higher_ids_first else ids, -values))


def plain_law(
    row: np.ndarray, params: SamplingParams, window: list[int], *, higher_ids_first: bool = False
) -> Law:
    """The law by one sort of the whole row, in the arithmetic that laws have.

    That is float64, masses added from the highest down, probabilities by id.
    """
    logits = row.copy()
    for token, bias in params.logit_bias.items():
        if token < len(logits):
            logits[token] += bias
    for token in sorted(set(window)):
        if params.has_penalties and token < len(logits):
            value, scale = logits[token], np.float32(params.repeat_penalty)
            value = value * scale if value <= 0 else value / scale
            value -= np.float32(window.count(token)) * np.float32(params.frequency_penalty)
            logits[token] = value - np.float32(params.presence_penalty)
    order = ranked(logits, higher_ids_first=higher_ids_first)
    if params.is_greedy:
        return Law.point(int(order[0]))
    values = logits.astype(np.float64) - float(logits[order[0]])
    is_cut = 0 < params.top_k < len(logits)
    if is_cut:
        order = order[: params.top_k]
    is_ranked = 0 < params.top_k <= MOST_RANKED
    exp = np.vectorize(math.exp, [float]) if is_ranked else np.exp  # the C library's
    if params.top_p < 1.0:
        masses = exp(values[order]).cumsum()
        order = order[: int((masses < params.top_p * masses[-1]).sum()) + 1]
    if params.min_p > 0.0:
        order = order[values[order] >= math.log(params.min_p)]
    kept = np.sort(order)
    weights = exp(values[kept] / max(params.temperature, 1e-30))
    weights /= np.add.reduce(weights)
    is_dense = not (is_cut or is_ranked) and params.top_p == 1.0 and params.min_p == 0.0
    return Law(weights, None if is_dense else kept)
