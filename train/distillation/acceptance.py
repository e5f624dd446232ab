"""The acceptance rate alpha of a pair of models on texts, measured. Distillation raises it.

Leviathan et al. 2023: a token drawn from Q is accepted with probability sum min(P, Q) = 1 - TV(P,
Q) (theorem 3.5), and alpha is its mean over the positions of the target's text (corollary 3.6).
Tokens of one text are not independent, texts are: standard errors are those of a ratio over texts
(number accepted over number of positions, linearised).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specrun.bindings.errors import OptionError


@dataclass(frozen=True, slots=True)
class TextAcceptance:
    """One text: the sum of its positions' acceptance probabilities, and their number."""

    accepted: float
    n_positions: int


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """`rate` is alpha, `error` its standard error (infinite for a single text)."""

    rate: float
    error: float
    n_positions: int
    n_texts: int

    def __str__(self) -> str:
        return f"{self.rate:.4f} +- {self.error:.4f}"


@dataclass(frozen=True, slots=True)
class AcceptanceGain:
    """Alpha before and after on the same texts; `gain` is paired, so its `error` is small."""

    before: MeasuredAcceptance
    after: MeasuredAcceptance
    gain: float
    error: float


def acceptance_at(target_logits: Tensor, draft_logits: Tensor, temperature: float) -> Tensor:
    """Return the acceptance probability at each position: [..., vocab] twice to float64 [...].

    At temperature 0 both distributions are sure of their most likely token (the lowest id among
    equals). Vocabularies may differ in size: the drafter never drafts a token that it lacks, and
    the target never accepts one that it lacks.
    """
    n_shared = min(target_logits.shape[-1], draft_logits.shape[-1])
    if temperature == 0.0:
        return (target_logits.argmax(-1) == draft_logits.argmax(-1)).double()
    # Cut after the softmax: the mass of ids that the other lacks is lost, not spread over the
    # rest. In float64, as sums of small differences are compared.
    target, draft = (
        torch.softmax(logits.double() / temperature, -1)[..., :n_shared]
        for logits in (target_logits, draft_logits)
    )
    return torch.minimum(target, draft).sum(-1)


def mean_acceptance(texts: Sequence[TextAcceptance]) -> MeasuredAcceptance:
    """Return alpha over all positions of all texts."""
    n_positions = sum(text.n_positions for text in texts)
    if n_positions == 0:
        raise OptionError(
            "there is no position to measure acceptance at: the held-out texts have no answers"
        )
    rate = sum(text.accepted for text in texts) / n_positions
    error = _error([text.accepted - rate * text.n_positions for text in texts], n_positions)
    return MeasuredAcceptance(rate, error, n_positions, len(texts))


def acceptance_gain(
    before: Sequence[TextAcceptance], after: Sequence[TextAcceptance]
) -> AcceptanceGain:
    """Return alpha before and after, of the same texts in the same order."""
    if [text.n_positions for text in before] != [text.n_positions for text in after]:
        raise OptionError("acceptance before and after was measured on different texts")
    first, second = mean_acceptance(before), mean_acceptance(after)
    gain = second.rate - first.rate
    # Residuals of the paired difference: an easy text raises both rates, and cancels.
    differences = [
        new.accepted - old.accepted - gain * old.n_positions
        for old, new in zip(before, after, strict=True)
    ]
    return AcceptanceGain(first, second, gain, _error(differences, first.n_positions))


def _error(residuals: Sequence[float], n_positions: int) -> float:
    """Return the standard error of a ratio of sums over texts, whose `residuals` sum to zero."""
    n_texts = len(residuals)
    if n_texts < 2:
        return math.inf
    # n / (n - 1): residuals that sum to zero have one degree of freedom less.
    squares = math.fsum(residual * residual for residual in residuals)
    return math.sqrt(n_texts / (n_texts - 1) * squares) / n_positions
