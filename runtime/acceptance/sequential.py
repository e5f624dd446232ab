"""Sequential cascades: which of two models speaks, decided without the large one. NOT exact.

Narasimhan et al. 2024 (arXiv 2405.19261), section 2 and algorithm 2: the baselines of speculative
cascades. Nothing that the small model says is verified. With q its raw law at a place (the softmax
of its logits, before any transformation) and S the transformation that sampling makes:

    token-cascade     delta(q) = 1 where max q < 1 - alpha            (section 3.1, Chow's rule)
                      pi = (1 - delta) S(q) + delta S(p)
    sequence-cascade  the small model's whole answer y is kept unless exp(score(y)) < 1 - alpha;
                      the large one then answers anew

The score is the mean of log q(y_t), or a quantile of them: section 2's rule reads the probability
of the best answer, which nobody can compute, and which shrinks with every token, where a mean does
not. The end token counts, because it was said as well.

These are settings: what runs them is `specrun.runtime.sequential`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.errors import OptionError


@dataclass(frozen=True, slots=True)
class TokenCascade:
    """The small model speaks while it is sure: max q >= 1 - alpha. `alpha` in [0, 1], not exact."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        _require_share("token-cascade", "alpha", self.alpha)

    @property
    def name(self) -> str:
        """The expression that makes it."""
        return f"token-cascade(alpha={self.alpha:g})"

    @property
    def exact(self) -> bool:
        """Whether texts have the target's law: they have not."""
        return False

    def defers(self, largest: float) -> bool:
        """Whether the large model is asked where the small one's largest probability is this."""
        return largest < 1.0 - self.alpha


@dataclass(frozen=True, slots=True)
class SequenceCascade:
    """The small model's whole answer is kept if it was sure enough of its tokens, not exact.

    `quantile` None scores an answer by the mean of its tokens' log-probabilities; a number in
    [0, 1] by that quantile of them, 0 by the token that it was least sure of.
    """

    alpha: float = 0.5
    quantile: float | None = None

    def __post_init__(self) -> None:
        _require_share("sequence-cascade", "alpha", self.alpha)
        if self.quantile is not None:
            _require_share("sequence-cascade", "quantile", self.quantile)

    @property
    def name(self) -> str:
        """The expression that makes it."""
        score = "" if self.quantile is None else f", quantile={self.quantile:g}"
        return f"sequence-cascade(alpha={self.alpha:g}{score})"

    @property
    def exact(self) -> bool:
        """Whether texts have the target's law: they have not."""
        return False

    def defers(self, log_probs: Sequence[float]) -> bool:
        """Whether the large model answers anew, from log q of every token of the small one's."""
        if not log_probs:
            return False
        values = np.array(log_probs)
        score = values.mean() if self.quantile is None else np.quantile(values, self.quantile)
        return math.exp(float(score)) < 1.0 - self.alpha


SequentialCascade = TokenCascade | SequenceCascade
"""What `--accept` may name beside acceptance rules: a way to decode that verifies nothing."""


def _require_share(kind: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{kind}: {name} is {value:g}: give 0 to 1")
