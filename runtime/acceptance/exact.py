"""The token-wise rule for any tree: recursive rejection sampling over the draws of each node.

At a node with target distribution P and draws x_1..x_k made in this order, x_i from Q_i given
everything before it: start with R = P; accept x_i with probability min(1, R(x_i) / Q_i(x_i)); on
rejection R becomes norm(max(0, R - Q_i)); after the last rejection the token is drawn from R. A
point mass is accepted with probability R(x_i) and then removed from R.

One formula covers the literature: a chain is Leviathan et al. (2023, algorithm 1) and Chen et al.
(2023); i.i.d. siblings are SpecInfer's multi-step speculative sampling (Miao et al. 2023, algorithm
2); siblings without replacement are Sequoia (Chen et al. 2024, algorithm 2); point masses are
greedy trees, n-grams and Medusa or EAGLE-2 drafts. Greedy decoding is P a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.rule import (
    Acceptance,
    LawAt,
    count_to_test,
    settle_point_masses,
    walk,
)
from specrun.runtime.laws.law import FloatArray, Law, scale_to_one
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.trees.tree import ROOT, DraftTree, Draw


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
        by = settle_point_masses if tree.is_of_points else decide
        return walk(tree, law_at, noise, position, by)


def decide(
    tree: DraftTree,
    draws: Sequence[Draw],
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
    for draw in islice(draws, n_tested):
        token = tree.tokens[draw.node]
        target_prob = remaining.probability(token)
        draft_prob = 1.0 if draw.law is None else draw.law.probability(token)
        if draft_prob <= 0.0:
            raise OptionError(f"token {token} was drafted from a distribution that lacks it")
        if target_prob > 0.0 and noise.accept(target_prob / draft_prob):
            return draw.node, token
        # Rejected: the next draw is tested against the residual.
        remaining = remaining.without(token) if draw.law is None else remaining.residual(draw.law)
    return settle_point_masses(tree, draws[n_tested:], remaining, noise)


# == Block verification: accepts or rejects a chain as a whole, and keeps more =====================
#
# Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), algorithm 2. With p_0 =
# 1, draft distributions Q_i and target distributions P_i (P_{i+1} is the distribution after x_i):
#
#     p_i = min(1, p_{i-1} P_i(x_i) / Q_i(x_i))    the target's mass for x_1..x_i
#     S_i = sum_x (p_i P_{i+1}(x) - Q_{i+1}(x))+   its part that x_{i+1} cannot have
#     h_i = S_i / (S_i + 1 - p_i) for i < L, h_L = p_L
#
# keep the last i with u_i <= h_i (none: i = 0); the next token is drawn from norm((p_i P_{i+1} -
# Q_{i+1})+), after full acceptance from P_{L+1}. Token-wise acceptance keeps i tokens with
# probability prod min(1, P_j/Q_j) <= p_i.
#
# Why it is exact: whatever is drafted below it, x_1..x_i is kept with probability p_i given its
# value. By induction from the end: E[p_{i+1}] = sum min(Q_{i+1}, p_i P_{i+1}) = p_i - S_i, and (p_i
# - S_i) + (1 - p_i + S_i) h_i = p_i. So the token after it is x with probability min(Q, p_i P)(x) +
# S_i norm((p_i P - Q)+)(x) = p_i P(x). The argument needs no fixed length: where the chain ends may
# depend on the tokens above and on the distribution of the next one, as with `planning.draft_plan`,
# though not on the value of a draw that is then left out; and at its end any exact rule may go on.
#
# Degenerate cases. If p_i = 1 and S_i = 0, then P_{i+1} = Q_{i+1} and h_i is 0/0: the next token is
# never refused, so only rounding matters; h_i = 1 and the residual is P_{i+1}. Once p_i = 0 nothing
# deeper can be kept, and no further distribution is computed.


class BlockRule:
    """Block verification of the tree's leading chain, the token-wise rule for branches below.

    A tree that branches at its root is therefore left to the token-wise rule. So is one whose
    leading chain holds only point masses: there both rules have one distribution, and the
    token-wise one repeats plain decoding's own text.
    """

    name = "exact"
    exact = True

    def __init__(self) -> None:
        self._token_wise = ExactRule()

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Keep the longest prefix of the leading chain that passes (see the module's formula)."""
        if tree.is_of_points:
            return walk(tree, law_at, noise, position, settle_point_masses)
        chain = _leading_chain(tree)
        if all(law is None for _, law in chain):
            return self._token_wise.accept(tree, law_at, noise, position)
        levels, share = _levels(tree, chain, law_at)
        # All tests are keyed with the round's first position, which no later round visits. With
        # their own, the numbers that refused the tail would return next round, no longer uniform.
        noise.seek(position)
        # h_L = p_L: the whole chain is kept with the mass that it may still claim.
        if share > 0.0 and noise.accept(share):
            return self._below(tree, chain, law_at, noise, position)
        kept = len(levels) - 1
        # From the deepest up: h_i is the probability of i given that no more are kept. A draft that
        # passes no test keeps nothing.
        while kept > 0 and not noise.accept(levels[kept].keep_probability):
            kept -= 1
        # The recovered token is drawn with the numbers of its own position.
        noise.seek(position + kept)
        path = tuple([node for node, _ in chain[:kept]])
        return Acceptance(path, noise.choose(levels[kept].residual()), rejected=True)

    def _below(
        self, tree: DraftTree, chain: list[Draw], law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Return the fully accepted chain and the accepted path below it, token by token."""
        last = chain[-1].node
        # The chain's end takes the root's place, so that the other rule sees an ordinary tree.
        below = replace(tree, draws={**tree.draws, ROOT: tree.draws.get(last, ())})

        def law_below(node: int) -> Law:
            return law_at(last if node == ROOT else node)

        rest = self._token_wise.accept(below, law_below, noise, position + len(chain))
        path = (*(draw.node for draw in chain), *rest.path)
        return Acceptance(path, rest.next_token, rest.rejected)


class _Level:
    """After i tokens of the chain: p_i, P_{i+1} and Q_{i+1}.

    Passes over the vocabulary wait until they are needed: a draft kept whole needs none.
    """

    __slots__ = ("_left", "_total", "draft", "law", "share")

    def __init__(self, share: float, law: Law, draft: Law) -> None:
        self.share, self.law, self.draft = share, law, draft
        self._left: FloatArray | None = None

    @property
    def total(self) -> float:
        """The sum S_i of the weights (p_i P_{i+1} - Q_{i+1})+ of the recovered token."""
        if self._left is None:
            self._left = self.law.left_over(self.draft, self.share)
            self._total = scale_to_one(self._left)
        return self._total

    @property
    def keep_probability(self) -> float:
        """The paper's h_i: the probability of keeping exactly i tokens, given no more are kept."""
        rest = self.total + (1.0 - self.share)
        # 0/0 only where p_i = 1 and S_i = 0 (the module's degenerate cases).
        return self.total / rest if rest > 0.0 else 1.0

    def residual(self) -> Law:
        """Return the distribution of the recovered token."""
        if self.total <= 0.0 or self._left is None:
            return self.law
        return Law(self._left, self.law.ids)


def _leading_chain(tree: DraftTree) -> list[Draw]:
    """Return the draws from the root down to the first node that has none or several."""
    chain: list[Draw] = []
    below = tree.draws.get
    draws = below(ROOT)
    # Draws are counted, not nodes: equal draws share a node, but each has to be tested.
    while draws is not None and len(draws) == 1:
        draw = draws[0]
        chain.append(draw)
        draws = below(draw[0])
    return chain


def _levels(tree: DraftTree, chain: list[Draw], law_at: LawAt) -> tuple[list[_Level], float]:
    """Return the levels above the chain's draws and p_L; once the share is 0, fewer and 0.0."""
    levels: list[_Level] = []
    share, node, tokens = 1.0, ROOT, tree.tokens
    for drawn, drawn_law in chain:
        token = tokens[drawn]
        # A point mass is the distribution that is sure of its token: Q_i(x_i) = 1.
        draft = Law.point(token) if drawn_law is None else drawn_law
        draft_prob = draft.probability(token)
        if draft_prob <= 0.0:
            raise OptionError(f"token {token} was drafted from a distribution that lacks it")
        law = law_at(node)
        # Before the share moves on: a level pairs p_i with the distributions of token i + 1.
        levels.append(_Level(share, law, draft))
        share = share * law.probability(token) / draft_prob
        if share > 1.0:
            share = 1.0
        elif share <= 0.0:
            break
        node = drawn
    return levels, share
