"""How far a drafter's law Q is from the target's law P: the four divergences DistillSpec distils with.

Zhou et al. 2023, "DistillSpec: Improving Speculative Decoding via Knowledge Distillation", section 3. Each takes the
log-probabilities of P and of Q, [..., n_words], and gives nats (the total variation: a share), [...]. Gradients flow
into Q; in logits z of Q they are stated below, q = softmax(z). Only the total variation is what is lost in speed:
alpha is 1 - TV(P, Q) (Leviathan et al. 2023, corollary 3.6), and by Pinsker's inequality TV <= sqrt(KL / 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, logaddexp

__all__ = ["DIVERGENCES", "Divergence", "forward_kl", "jensen_shannon", "reverse_kl", "total_variation"]

Divergence = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of the target and of the drafter, [..., n_words], to the divergence at each position, [...]."""


def forward_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return KL(P || Q) = sum P log(P / Q): Q must cover whatever P says. Gradient in z: q - p."""
    return _mean_difference(target_log_probs, target_log_probs, draft_log_probs)


def reverse_kl(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return KL(Q || P) = sum Q log(Q / P): Q must stay where P is. Gradient in z: q (log(q / p) - KL(Q || P))."""
    return _mean_difference(draft_log_probs, draft_log_probs, target_log_probs)


def jensen_shannon(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return (KL(P || M) + KL(Q || M)) / 2 with M = (P + Q) / 2: at most log 2, whatever the laws.

    Gradient in z: q (log(q / m) - KL(Q || M)) / 2.
    """
    middle = logaddexp(target_log_probs, draft_log_probs) - math.log(2.0)
    from_target = _mean_difference(target_log_probs, target_log_probs, middle)
    from_draft = _mean_difference(draft_log_probs, draft_log_probs, middle)
    return (from_target + from_draft) / 2


def total_variation(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return sum |P - Q| / 2 = 1 - sum min(P, Q): the share of drafted words that are rejected.

    Gradient in z: q (s - sum s q) / 2 with s = sign(q - p): a word of probability near 0 in Q hardly moves.
    """
    return (target_log_probs.exp() - draft_log_probs.exp()).abs().sum(-1) / 2


def _mean_difference(weights: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Return the mean of `one` - `other` under the law whose logarithms are `weights`; where that is 0, nothing."""
    probs = weights.exp()
    return (probs * (one - other).masked_fill(probs == 0.0, 0.0)).sum(-1)


DIVERGENCES: Mapping[str, Divergence] = MappingProxyType(
    {
        "forward-kl": forward_kl,
        "reverse-kl": reverse_kl,
        "jensen-shannon": jensen_shannon,
        "total-variation": total_variation,
    }
)
"""The divergences by the names users give them."""
