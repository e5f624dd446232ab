"""The token-wise rule for any tree: recursive rejection sampling over the draws of each node.

At a node with target law P and draws x_1..x_k made in this order, x_i from Q_i given everything
before it: start with R = P; accept x_i with probability min(1, R(x_i) / Q_i(x_i)); on rejection R
becomes norm(max(0, R - Q_i)); after the last rejection the token is drawn from R. A point mass is
accepted with probability R(x_i) and then removed from R.

One formula covers the literature: a chain is Leviathan et al. (2023, algorithm 1) and Chen et al.
(2023); i.i.d. siblings are SpecInfer's multi-step speculative sampling (Miao et al. 2023, algorithm
2); siblings without replacement are Sequoia (Chen et al. 2024, algorithm 2); point masses are
greedy trees, n-grams and Medusa or EAGLE-2 drafts. Greedy decoding is P a point mass.
"""

from __future__ import annotations

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.followed import FollowedLaws
from specrun.runtime.acceptance.rule import (
    Acceptance,
    LawAt,
    count_to_test,
    settle_point_masses,
    walk,
)
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource
from specrun.runtime.tree import DraftTree, Draw


class ExactRule:
    """Keeps the target's distribution exactly, for any tree of draws and point masses.

    `--accept token`; `--accept exact` verifies chains of draws as blocks and leaves all else to it.
    """

    name = "token"
    exact = True

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Walk down from the root, deciding one token per node (see the module's formula)."""
        if isinstance(law_at, FollowedLaws):
            followed = law_at.followed(tree, noise, position, as_block=False)
            if isinstance(followed, Acceptance):
                return followed
            noise = followed
        return walk(tree, law_at, noise, position, decide)


def decide(
    tree: DraftTree,
    draws: tuple[Draw, ...],
    law: Law,
    noise: NoiseSource,
) -> tuple[int | None, int]:
    """Return the accepted child (None after rejecting all) and the token that comes next.

    `law` is the target's at the node, `draws` its drafted children in the order they were drawn.
    """
    n_tested = count_to_test(draws)
    if not n_tested:
        return settle_point_masses(tree, draws, law, noise)
    remaining = law
    for draw in draws[:n_tested]:
        token = tree.tokens[draw.node]
        target_prob = remaining.probability(token)
        draft_prob = 1.0 if draw.law is None else draw.law.probability(token)
        if draft_prob <= 0.0:
            raise OptionError(f"token {token} was drafted from a law that gives it probability 0")
        if target_prob > 0.0 and noise.accept(target_prob / draft_prob):
            return draw.node, token
        # Rejected: the next draw is tested against what the target's law has left.
        remaining = remaining.without(token) if draw.law is None else remaining.residual(draw.law)
    return settle_point_masses(tree, draws[n_tested:], remaining, noise)
