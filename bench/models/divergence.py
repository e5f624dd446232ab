"""Perplexity and KL divergence of one model's laws from another's, over many rows of logits.

Standard errors are those of a mean over rows taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowDivergence:
    """Per row: both models' negative log-likelihood of the token that came, KL(P || Q) of the
    original's law P from the other's Q (all in nats), and whether their most likely token agrees.
    """

    original_nll: Floats
    other_nll: Floats
    kl: Floats
    same_top: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood, with its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class DivergenceSummary:
    """Figures over all rows: KL in nats, `same_top` a share, `..._error` standard errors."""

    n_tokens: int
    original: Perplexity
    other: Perplexity
    kl_mean: float
    kl_error: float
    kl_median: float
    kl_99: float
    kl_largest: float
    same_top: float
    top_error: float


def row_divergence(
    original: npt.NDArray[Any], other: npt.NDArray[Any], tokens: Sequence[int]
) -> RowDivergence:
    """Compare logits of shape [rows, vocab]; `tokens` came after each row."""
    log_p, log_q = log_laws(original), log_laws(other)
    rows, came = np.arange(len(tokens)), np.asarray(tokens)
    p = np.exp(log_p)
    # A token that the original never says adds nothing, whatever the other thinks of it.
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (log_p - log_q), 0.0)
    return RowDivergence(
        original_nll=-log_p[rows, came],
        other_nll=-log_q[rows, came],
        kl=np.maximum(terms.sum(axis=1), 0.0),  # below zero by rounding only
        same_top=log_p.argmax(axis=1) == log_q.argmax(axis=1),
    )


def summarise_rows(parts: Sequence[RowDivergence]) -> DivergenceSummary:
    """Return the figures over all rows; at least one is needed."""
    if not parts:
        raise OptionError("there is nothing to compare: the text is too short")
    kl = np.concatenate([part.kl for part in parts])
    same = np.concatenate([part.same_top for part in parts])
    share = float(same.mean())
    return DivergenceSummary(
        n_tokens=len(kl),
        original=_perplexity(np.concatenate([part.original_nll for part in parts])),
        other=_perplexity(np.concatenate([part.other_nll for part in parts])),
        kl_mean=float(kl.mean()),
        kl_error=_standard_error(kl),
        kl_median=float(np.median(kl)),
        kl_99=float(np.quantile(kl, 0.99, method="higher")),
        kl_largest=float(kl.max()),
        same_top=share,
        top_error=math.sqrt(share * (1 - share) / len(same)),
    )


def log_laws(logits: npt.NDArray[Any]) -> Floats:
    """Return log softmax of each row; the greatest logit is taken off so that exp stays finite."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return np.asarray(rows)


def _perplexity(nll: Floats) -> Perplexity:
    # A token given probability 0 makes it infinite, which is what it then is.
    value = math.exp(min(float(nll.mean()), 700.0)) if np.isfinite(nll).all() else math.inf
    # By the delta method: the derivative of exp at the mean is the perplexity itself.
    return Perplexity(value, value * _standard_error(nll))


def _standard_error(values: Floats) -> float:
    if not np.isfinite(values).all():
        return math.inf
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0
