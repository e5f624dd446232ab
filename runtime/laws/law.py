"""Probability laws over tokens, dense or on a small support, and the arithmetic acceptance needs.

Laws are in float64: they come from float32 logits, but residuals subtract nearly equal numbers. Of
a `RankedLaw` only the best tokens are known: what a head names on its device, without a whole row.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.compiled import LOOPS, UnmadeLaw

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.intp]

SHORT = 128
"""Tokens of a law up to which a loop is quicker than numpy."""

# Shared by all point masses, hence read-only.
_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """Token i of `ids` has probability `probs[i]`; with `ids` None, token i has `probs[i]` (dense).

    `ids` is ascending, so that a draw by inverse cumulative probability runs in token order and one
    uniform number picks the same token whichever way the support was found.
    """

    probs: FloatArray
    ids: IdArray | None = None

    @staticmethod
    def point(token: int) -> Law:
        """Return the law that is sure of `token`."""
        return _point(token)

    @staticmethod
    def normalised(weights: FloatArray, ids: IdArray | None = None) -> Law:
        """Return the law proportional to non-negative `weights`, which must have positive mass."""
        total = float(weights.sum())
        # NaN is not greater than 0: asked this way, it is refused.
        if not total > 0.0 or not np.isfinite(total):
            raise OptionError(f"weights with total mass {total} are not a law")
        return Law(weights / total, ids)

    def probability(self, token: int) -> float:
        """Return the probability of `token`, 0.0 outside the support."""
        ids = self.ids
        if ids is None:
            # A drafter's vocabulary may be shorter: tokens beyond it have no mass.
            return float(self.probs[token]) if token < len(self.probs) else 0.0
        place = _place_of(token, ids) if LOOPS is None else LOOPS.place_of(token, ids)
        return self.probs.item(place) if place >= 0 else 0.0

    def token_at(self, uniform: float) -> int:
        """Return the token at `uniform` (in [0, 1)) of the cumulative law, none of zero mass."""
        if len(self.probs) == 1:
            return 0 if self.ids is None else int(self.ids[0])
        if LOOPS is not None and len(self.probs) <= SHORT:
            index = LOOPS.place_at(self.probs, uniform)
            return index if self.ids is None else int(self.ids[index])
        cumulative = self.probs.cumsum()
        # Scaling by the last sum absorbs rounding; side "right" steps over entries of zero mass.
        index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        # The product may round up to the sum itself: the last token with mass is meant.
        if index >= len(cumulative):
            index = int(np.flatnonzero(self.probs)[-1])
        return index if self.ids is None else int(self.ids[index])

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token of highest probability (lowest id among equals) and that probability."""
        if self.ids is not None and len(self.ids) == 1:
            return int(self.ids[0]), 1.0
        index = int(self.probs.argmax())
        return (index if self.ids is None else int(self.ids[index])), float(self.probs[index])

    def residual(self, draft: Law) -> Law:
        """Return norm(max(0, P - Q)), the law after a draw from `draft` was rejected.

        (Leviathan et al. 2023, section 2.3; Chen et al. 2023, equation 2.) If nothing is left, P
        equals Q and a rejection has probability zero: it can only come from rounding, and P itself
        is returned.
        """
        left = self.left_over(draft)
        return Law(left, self.ids) if scale_to_one(left) > 0.0 else self

    def left_over(self, draft: Law, share: float = 1.0) -> FloatArray:
        """Return max(0, share P - Q) of the tokens of this law, in its order."""
        ids, draft_ids = self.ids, draft.ids
        if LOOPS is not None and ids is not None and draft_ids is not None:
            left = np.empty(len(ids))
            LOOPS.left_over(self.probs, ids, draft.probs, draft_ids, share, left)
            return left
        left = share * self.probs - draft.aligned_to(self)
        np.maximum(left, 0.0, out=left)
        return left

    def surplus(self, draft: Law) -> float:
        """Return sum max(0, P - Q): the total variation between two laws."""
        ids, draft_ids = self.ids, draft.ids
        if LOOPS is not None and ids is not None and draft_ids is not None:
            return LOOPS.distance(self.probs, ids, draft.probs, draft_ids)
        return float(np.add.reduce(self.left_over(draft)))

    def without(self, token: int) -> Law:
        """Return the law given that it is not `token`: the residual of a rejected point mass.

        A law that is sure of `token` is returned as it is: rejecting it then had probability zero.
        """
        place = token if self.ids is None else _place_of(token, self.ids)
        if not 0 <= place < len(self.probs):
            return self
        left = self.probs.copy()
        left[place] = 0.0
        return Law(left, self.ids) if scale_to_one(left) > 0.0 else self

    def aligned_to(self, other: Law) -> FloatArray:
        """Return this law's probabilities of the tokens of `other`, in its order."""
        if other.ids is None:
            dense = np.zeros(len(other.probs))
            if self.ids is None:
                # Vocabularies may differ by padding: a token that one lacks has no mass there.
                n = min(len(dense), len(self.probs))
                dense[:n] = self.probs[:n]
            else:
                inside = self.ids < len(dense)
                dense[self.ids[inside]] = self.probs[inside]
            return dense
        if self.ids is None:
            inside = other.ids < len(self.probs)
            # The inner 0 is only a valid index: its value is not used.
            return np.where(inside, self.probs[np.where(inside, other.ids, 0)], 0.0)
        # One past the end is no index; the last slot then fails the comparison.
        slots = np.minimum(self.ids.searchsorted(other.ids), len(self.ids) - 1)
        return np.where(self.ids[slots] == other.ids, self.probs[slots], 0.0)


_ID_BYTES = np.dtype(np.intp).itemsize  # and a probability's: elsewhere there are no compiled laws


def made_law(law: UnmadeLaw) -> Law:
    """Return a law that lies among others."""
    laws, number, room, size = law
    ids = np.frombuffer(laws, np.intp, 2 * room, number * 2 * room * _ID_BYTES)
    return Law(ids[room : room + size].view(np.float64), ids[:size])


def side_by_side(law: Law, other: Law) -> tuple[FloatArray, FloatArray, IdArray | None]:
    """Return both laws' probabilities of all tokens of either, and the ids, rising.

    They are None where both laws have all tokens.
    """
    ids, others = law.ids, other.ids
    if ids is None and others is None and len(law.probs) == len(other.probs):
        return law.probs, other.probs, None
    if LOOPS is not None and ids is not None and others is not None:
        room = len(ids) + len(others)
        probs, other_probs, joint = np.empty(room), np.empty(room), np.empty(room, np.intp)
        n = LOOPS.join(law.probs, ids, other.probs, others, probs, other_probs, joint)
        return probs[:n], other_probs[:n], joint[:n]
    first, second = (
        np.arange(len(each.probs)) if each.ids is None else each.ids for each in (law, other)
    )
    joint = np.union1d(first, second)
    support = Law(np.zeros(len(joint)), joint)
    return law.aligned_to(support), other.aligned_to(support), joint


def _place_of(token: int, ids: IdArray) -> int:
    """Return the place of a token among ascending ids, -1 if it is not there."""
    if LOOPS is not None:
        return LOOPS.place_of(token, ids)
    place = bisect_left(ids, token)  # a few comparisons, quicker than a numpy call
    return place if place < len(ids) and ids[place] == token else -1


def scale_to_one(weights: FloatArray) -> float:
    """Divide weights by their sum, unless that is not positive; return the sum."""
    if LOOPS is not None:
        return LOOPS.scale_to_one(weights)
    total = float(np.add.reduce(weights))
    if total > 0.0:
        weights /= total
    return total


class LawWithout(Law):
    """`law.without(token)`, worked out when its probabilities are first read.

    Drawing siblings without replacement makes one such law for each but the first, and acceptance
    reads the laws of the few draws that it visits.
    """

    __slots__ = ("_origin", "_worked_out")
    _origin: tuple[Law, int]
    _worked_out: FloatArray  # missing until it is needed

    def __init__(self, law: Law, token: int) -> None:
        object.__setattr__(self, "_origin", (law, token))

    @property
    def probs(self) -> FloatArray:
        """The probabilities on the support of the law that it comes from."""
        try:
            return self._worked_out
        except AttributeError:
            law, token = self._origin
            probs = law.without(token).probs
            object.__setattr__(self, "_worked_out", probs)
            return probs

    @property
    def ids(self) -> IdArray | None:
        """The support of the law that it comes from."""
        return self._origin[0].ids


class _PointLaw(Law):
    """The law that is sure of a token: greedy rounds ask these for little else than the token."""

    __slots__ = ("_token",)
    _token: int

    def __init__(self, token: int) -> None:
        super().__init__(_CERTAIN, np.array([token], np.intp))
        object.__setattr__(self, "_token", token)

    def probability(self, token: int) -> float:
        """Return 1.0 for the token."""
        return 1.0 if token == self._token else 0.0

    def token_at(self, uniform: float) -> int:
        """Return the token."""
        return self._token

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token, and 1.0."""
        return self._token, 1.0


# Greedy rounds make several of these for every token, mostly of the same tokens.
_point = functools.lru_cache(maxsize=4096)(_PointLaw)


class RankedLaw(Law):
    """Tokens in order, the most likely first, with their log-probabilities in nats, both [ranks].

    Trees of favourites ask for `best` only, which costs no sorting. As a law it is that of these
    tokens alone, renormalised and in the order of their ids, worked out when it is first read.
    """

    __slots__ = ("_best", "_log_probs", "_sorted", "_tokens")
    _tokens: npt.NDArray[np.int32]
    _log_probs: npt.NDArray[np.float32]
    _best: list[tuple[int, float]]  # missing until it is needed
    _sorted: Law  # missing until it is needed

    def __init__(self, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]) -> None:
        object.__setattr__(self, "_tokens", tokens)
        object.__setattr__(self, "_log_probs", log_probs)

    @classmethod
    def of_rows(
        cls, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]
    ) -> list[RankedLaw]:
        """Return the laws of n rows, both [n, ranks], their probabilities worked out at once."""
        laws = [cls(row, values) for row, values in zip(tokens, log_probs, strict=True)]
        probs = np.exp(log_probs, dtype=np.float64).tolist()
        for law, row, values in zip(laws, tokens.tolist(), probs, strict=True):
            object.__setattr__(law, "_best", _without_zeros(row, values))
        return laws

    def best(self, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens with their whole-law probabilities, none of 0."""
        try:
            return self._best[:count]
        except AttributeError:
            probs = np.exp(self._log_probs[:count], dtype=np.float64).tolist()
            return _without_zeros(self._tokens[:count].tolist(), probs)

    @property
    def most_likely(self) -> tuple[int, float]:
        """The best token with its probability in the whole law."""
        best = self.best(1)
        return best[0] if best else super().most_likely

    @property
    def probs(self) -> FloatArray:
        """The probabilities of the tokens, by id."""
        return self._by_id.probs

    @property
    def ids(self) -> IdArray | None:
        """The tokens by id."""
        return self._by_id.ids

    @property
    def _by_id(self) -> Law:
        try:
            return self._sorted
        except AttributeError:
            # A law's ids ascend, whatever the ranking: see `Law`.
            order = np.argsort(self._tokens)
            weights = np.exp(self._log_probs[order], dtype=np.float64)
            law = Law.normalised(weights, self._tokens[order].astype(np.intp))
            object.__setattr__(self, "_sorted", law)
            return law


def _without_zeros(tokens: list[int], probs: list[float]) -> list[tuple[int, float]]:
    return [(token, prob) for token, prob in zip(tokens, probs, strict=True) if prob > 0.0]
