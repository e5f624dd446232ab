"""Logits to law: logit bias, penalties, top-k, top-p, min-p, temperature, in llama.cpp's order.

The same function serves the target and a draft model, so that both laws are cut the same way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import DecodeFailedError
from specrun.runtime.law import FloatArray, IdArray, Law
from specrun.runtime.sampling import SamplingParams

__all__ = ["Logits", "log_probability", "penalty_window", "transformed_law"]

Logits = npt.NDArray[np.float32]
_GROUP = 32


def transformed_law(logits: Logits, params: SamplingParams, window: Sequence[int] = ()) -> Law:
    """Return the law that `params` make of one row of logits, float32 [n_vocab].

    `window` are the tokens that penalties look at, oldest first (see `penalty_window`).
    """
    if params.logit_bias or (window and params.has_penalties):
        logits = logits.copy()
        _add_bias(logits, params)
        _penalise(logits, params, window)
    if params.is_greedy:
        token = int(logits.argmax())
        _require_finite(float(logits[token]))
        return Law.point(token)
    ids = _kept_by_top_k(logits, params.top_k)
    values = (logits if ids is None else logits[ids]).astype(np.float64)
    highest = float(values.max())
    _require_finite(highest)
    values -= highest
    if params.top_p < 1.0:
        ids, values = _cut(ids, values, _top_p_mask(values, params.top_p))
    if params.min_p > 0.0:
        ids, values = _cut(ids, values, values >= math.log(params.min_p))
    values /= params.temperature
    np.exp(values, out=values)
    values /= values.sum()
    return Law(values, ids)


def penalty_window(tokens: Sequence[int], path: Sequence[int], params: SamplingParams) -> list[int]:
    """Return the last `repeat_last_n` tokens of `tokens` followed by a draft path."""
    if not params.has_penalties:
        return []
    n = params.repeat_last_n
    if n < 0:
        return [*tokens, *path]
    return [*tokens[-n:], *path][-n:]


def log_probability(logits: Logits, token: int) -> float:
    """Return log softmax(logits)[token] of one row, before any transformation, in nats."""
    shifted = logits - logits.max()
    value = float(shifted[token])
    np.exp(shifted, out=shifted)
    return value - math.log(float(shifted.sum(dtype=np.float64)))


def _require_finite(value: float) -> None:
    if not math.isfinite(value):
        raise DecodeFailedError(f"the model gave logits of {value}: the file or the backend is broken", -3)


def _add_bias(logits: Logits, params: SamplingParams) -> None:
    for token, bias in params.logit_bias.items():
        if token < len(logits):
            logits[token] += bias


def _penalise(logits: Logits, params: SamplingParams, window: Sequence[int]) -> None:
    """Apply repeat (CTRL, Keskar et al. 2019, section 4.1), frequency and presence penalties in place."""
    if not window or not params.has_penalties:
        return
    counts = Counter(token for token in window if token < len(logits))
    if not counts:
        return
    ids = np.fromiter(counts.keys(), np.intp, len(counts))
    times = np.fromiter(counts.values(), np.float32, len(counts))
    values = logits[ids]
    scale = np.float32(params.repeat_penalty)
    values = np.where(values <= 0, values * scale, values / scale)
    logits[ids] = values - times * np.float32(params.frequency_penalty) - np.float32(params.presence_penalty)


def _kept_by_top_k(logits: Logits, k: int) -> IdArray | None:
    """Return the ids of the k highest logits, ascending; None keeps all.

    A sort of the whole row would cost more than the rest of a round. Instead the row is cut into groups:
    the k-th highest group maximum is a bound that k entries reach and every one of the k highest entries
    too, so only the entries above it (about k to 2k of them) are ever sorted.
    """
    n = len(logits)
    if k <= 0 or k >= n:
        return None
    groups = n // _GROUP
    if groups < 2 * k:
        order = np.argsort(-logits, kind="stable")[:k]
        return np.sort(order)
    maxima = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    bound = np.partition(maxima, groups - k)[groups - k]
    candidates = np.flatnonzero(logits >= bound)
    if len(candidates) > k:
        # Stable, so that equal logits are kept in token order.
        order = np.argsort(-logits[candidates], kind="stable")[:k]
        candidates = np.sort(candidates[order])
    return candidates


def _top_p_mask(values: FloatArray, top_p: float) -> npt.NDArray[np.bool_]:
    """Return which entries belong to the smallest set of highest probability with mass >= top_p."""
    probs = np.exp(values)
    order = np.argsort(-probs, kind="stable")
    cumulative = probs[order].cumsum()
    count = int(cumulative.searchsorted(top_p * cumulative[-1], side="left")) + 1
    mask = np.zeros(len(values), np.bool_)
    mask[order[:count]] = True
    return mask


def _cut(ids: IdArray | None, values: FloatArray, mask: npt.NDArray[np.bool_]) -> tuple[IdArray | None, FloatArray]:
    if mask.all():
        return ids, values
    return (np.flatnonzero(mask) if ids is None else ids[mask]), values[mask]
