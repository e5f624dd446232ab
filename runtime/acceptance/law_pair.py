"""Pairs of distributions, drafter's and target's, raw and as tokens are drawn, for cascades.

q and p are softmax of the untransformed rows of logits, S(q) and S(p) those after sampling
settings: the distributions that tokens come from. Deferral is decided by the raw distributions and
mixes the transformed ones (Narasimhan et al. 2024, appendix C.1): at temperature 0, or behind a
narrow top-p, the transformed distributions have nothing left to compare.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.runtime.acceptance.exact import decide
from specrun.runtime.acceptance.rule import Acceptance, walk
from specrun.runtime.laws.law import FloatArray, IdArray, Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.laws.rows import Sums, log_mass
from specrun.runtime.laws.transform import Logits
from specrun.runtime.trees.tree import DraftTree

Mask = npt.NDArray[np.bool_]


class RawLaw(Law):
    """softmax(logits) of a row [n_vocab], untransformed; nothing is worked out before it is needed.

    Thresholds on its probabilities are compared in logits, so that few rules need its exponentials.
    """

    __slots__ = ("_highest", "_is_filled", "_logits", "_sums")

    def __init__(self, logits: Logits) -> None:
        self._logits, self._is_filled = logits, False
        # The highest logit, and with it sums (see `laws.rows.log_mass`), once they are needed.
        self._highest: float | None = None
        self._sums: Sums | None = None

    def _fill(self) -> None:
        if not self._is_filled:
            self._hold(np.exp(self._logits.astype(np.float64) - self.log_mass), None)
            self._is_filled = True

    def _summed(self) -> Sums:
        if self._sums is None:
            self._sums = log_mass(self._logits)
        return self._sums

    @property
    def log_mass(self) -> float:
        """log sum exp(logits)."""
        highest, mass, _ = self._summed()
        return highest + math.log(mass)

    @property
    def highest(self) -> float:
        """The highest logit."""
        if self._highest is None:
            sums = self._sums
            self._highest = sums[0] if sums else float(np.maximum.reduce(self._logits))
        return self._highest

    @property
    def entropy(self) -> float:
        """The entropy, in nats."""
        # H = log sum exp(x) - sum p x, with the highest at 0: no shift changes it.
        _, mass, weighted = self._summed()
        return math.log(mass) - weighted / mass

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token of the highest logit (lowest id among equals) and its probability."""
        return int(self._logits.argmax()), math.exp(self.highest - self.log_mass)

    def logit(self, token: int) -> float:
        """Return the logit of a token, -inf if the row lacks it."""
        return float(self._logits[token]) if token < len(self._logits) else -math.inf

    @property
    def row(self) -> Logits:
        """The logits themselves, [n_vocab]."""
        return self._logits

    def logits_of(self, ids: IdArray | None) -> FloatArray:
        """Return the logits of these tokens, -inf for those that the row lacks; None: of all."""
        if ids is None:
            return self._logits.astype(np.float64)
        if ids[-1] < len(self._logits):  # they ascend
            return self._logits[ids].astype(np.float64)
        inside = ids < len(self._logits)
        # The inner 0 is only a valid index: its value is not used.
        return np.where(inside, self._logits[np.where(inside, ids, 0)], -np.inf)


# Not frozen: that costs a call for every field, at every place.
@dataclass(slots=True)
class LawPair:
    """The drafter's distribution and the target's at one place: q, p, S(q) and S(p).

    If the drafter has no row (its own context has ended), its distributions are the target's.
    """

    raw_draft: Law
    raw_target: Law
    draft: Law
    target: Law

    @property
    def is_silent(self) -> bool:
        """Whether the drafter has no row here: then pi is the target's distribution."""
        return self.raw_draft is self.raw_target


PairAt = Callable[[int], LawPair]
"""The distributions after a node (or ROOT); worked out only for nodes that a rule visits."""


class PairRule(ABC):
    """A rule that emits a distribution pi, made of the drafter's and the target's distributions.

    Speculative sampling with a target distribution of one's own (Narasimhan et al. 2024, algorithm
    4): drafts face pi at every place, and the token after a whole draft comes from pi too, so that
    the output is exactly pi, however long drafts are. As pi depends on nothing that is drawn,
    this holds for trees, whatever scheme their siblings were drawn by.
    """

    exact = False

    name: str
    """The rule of `--accept`, with its parameters."""

    reads_raw_draft: bool = True
    """Whether it reads q itself: then every drafted place needs the drafter's whole row."""

    reads_draft: bool = True
    """Whether it reads more of the drafter than the drawn tokens and their distributions."""

    chains_only: bool = False
    """Whether its distribution does not hold for siblings."""

    fallback: float = 0.0
    """Drafts end before a token where the drafter's own largest raw probability is below this."""

    takes_points: bool = False
    """Whether, at temperature 0, the drafted token may stand for S(q) if q is unknown."""

    @abstractmethod
    def law(self, pair: LawPair) -> Law:
        """Return pi, the distribution of the token at this place."""

    def accept(
        self, tree: DraftTree, pair_at: PairAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Walk down the tree, one token per node, as the exact rule does, but with pi."""
        laws: list[tuple[Law, Law]] = []

        def law_at(node: int) -> Law:
            pair = pair_at(node)
            # If the drafter has no row, there is nothing to trade: not even p for p, of which
            # a token-specific rule would make another distribution.
            law = pair.target if pair.is_silent else self.law(pair)
            laws.append((law, pair.target))
            return law

        accepted = walk(tree, law_at, noise, position, decide)
        return Acceptance(accepted.path, accepted.next_token, accepted.rejected, tuple(laws))


# -- comparisons of distributions ------------------------------------------------------------------


def largest(law: Law) -> float:
    """Return the largest probability of a distribution."""
    if isinstance(law, RawLaw):
        return math.exp(law.highest - law.log_mass)
    return float(law.probs.max())


def entropy(law: Law) -> float:
    """Return the entropy of a distribution, in nats."""
    return law.entropy if isinstance(law, RawLaw) else _entropy(law.probs)


def _entropy(probs: FloatArray) -> float:
    # 0 log 0 counts as 0, where numpy would make NaN of it.
    probs = probs[probs > 0.0]
    return -float(np.add.reduce(probs * np.log(probs)))


def total_variation(law: Law, other: Law) -> float:
    """Return TV(P, Q) = sum max(0, P - Q), from 0 to 1."""
    if law is other:
        return 0.0
    # P's support is enough: elsewhere P - Q is not positive.
    return law.surplus(other)


class Bar(NamedTuple):
    """The tokens of a distribution with logits (or else probabilities) of at least `lowest`."""

    law: Law
    lowest: float

    def reached_by(self, ids: IdArray | None) -> Mask:
        """Return which of these tokens (None: all) reach it."""
        law, lowest = self
        entries = law.logits_of(ids) if isinstance(law, RawLaw) else _probabilities(law, ids)
        return entries >= lowest

    def is_reached_by(self, token: int) -> bool:
        """Whether a token reaches it."""
        law, lowest = self
        entry = law.logit(token) if isinstance(law, RawLaw) else law.probability(token)
        return entry >= lowest


def at_least(law: Law, threshold: float) -> Bar:
    """Return the bar that tokens of a probability of at least `threshold` reach."""
    if threshold <= 0.0:
        return Bar(law, -math.inf)
    if isinstance(law, RawLaw):
        return Bar(law, math.log(threshold) + law.log_mass)
    return Bar(law, threshold)


def at_least_of_best(law: Law, share: float) -> Bar:
    """Return the bar that tokens with at least `share` of the largest probability reach.

    Of a row of logits no exponential is needed: l(v) >= max l + log(share).
    """
    if isinstance(law, RawLaw):
        return Bar(law, law.highest + math.log(share) if share > 0.0 else -math.inf)
    return Bar(law, share * largest(law))


def among_best(law: Law, count: int) -> Bar:
    """Return the bar that the `count` likeliest tokens reach, with all equal to the last.

    Of a row of logits no exponential is needed.
    """
    every = law.row if isinstance(law, RawLaw) else law.probs
    if count >= len(every):
        return Bar(law, -math.inf)
    return Bar(law, float(np.partition(every, -count)[-count]))


def _probabilities(law: Law, ids: IdArray | None) -> FloatArray:
    return law.aligned_to(law if ids is None else Law(np.zeros(len(ids)), ids))
