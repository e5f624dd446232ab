# cython: annotation_typing=False, boundscheck=False, cdivision=True
"""Probability distributions over tokens, dense or on a few tokens, and the steps of acceptance.

Probabilities are in float64: they come from float32 logits, but residuals subtract nearly equal
numbers. Of a `RankedLaw` only the best tokens are known: those that a head names on its device.

This file is compiled by Cython if there is a compiler (`law.pxd` has the types), and interpreted
elsewhere: both give the same bits. Loops are for the few tokens that truncation leaves; numpy's
operations are for more tokens than `SHORT`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import DecodeFailedError, OptionError
from specrun.runtime.laws.rows import Logits, favourite, favourite_in_numpy, rank, rank_in_numpy

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.intp]

SHORT = 128
"""The most tokens of a distribution over which loops run."""

# The increment and the multipliers of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = 0xFFFFFFFFFFFFFFFF
_UNIT = 2.0**-53

_IS_COMPILED = not __file__.endswith(".py")

# Shared by all point masses, hence read-only.
_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


def split_mix(key: int, counter: int) -> int:
    """Return 64 bits: the output of SplitMix64 after `counter` steps from `key`."""
    word = (key + counter * _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def uniform_of(word: int) -> float:
    """Return the number in [0, 1) of which a word has the 53 bits."""
    return (word >> 11) * _UNIT


class Law:
    """Token i of `ids` has probability `probs[i]`; with `ids` None, token i has `probs[i]` (dense).

    `ids` ascends, so that a draw by inverse cumulative probability runs in token order and one
    uniform number picks the same token whichever way the support was found. Nothing changes one.
    """

    __slots__ = ("_held_ids", "_held_probs", "_ids", "_is_dense", "_probs", "_size")

    def __init__(self, probs: FloatArray, ids: IdArray | None = None) -> None:
        self._hold(probs, ids)

    def _hold(self, probs: FloatArray, ids: IdArray | None) -> None:
        # Arrays of a distribution that lies among others are made once they are read.
        self._held_probs: FloatArray | None = probs
        self._held_ids: IdArray | None = ids
        self._size, self._is_dense = len(probs), ids is None
        # The same numbers, as loops read them.
        self._probs = _read_by_loops(probs)
        if ids is not None:
            self._ids = _read_by_loops(ids)

    def _fill(self) -> None:
        """Let a subclass that puts off its probabilities `_hold` them now."""

    @property
    def probs(self) -> FloatArray:
        """The probabilities."""
        self._fill()
        if self._held_probs is None:
            self._held_probs = np.asarray(self._probs)
        return self._held_probs

    @property
    def ids(self) -> IdArray | None:
        """The tokens that have them; None: all."""
        self._fill()
        if self._held_ids is None and not self._is_dense:
            self._held_ids = np.asarray(self._ids, np.intp)
        return self._held_ids

    @property
    def size(self) -> int:
        """How many tokens there are."""
        self._fill()
        return self._size

    @staticmethod
    def point(token: int) -> Law:
        """Return the distribution that is sure of `token`."""
        return _Point(token)

    @staticmethod
    def normalised(weights: FloatArray, ids: IdArray | None = None) -> Law:
        """Return the distribution proportional to non-negative weights of positive mass."""
        total = float(weights.sum())
        # NaN is not greater than 0: written this way, it is refused.
        if not total > 0.0 or not np.isfinite(total):
            raise OptionError(f"weights with total mass {total} are not a law")
        return Law(weights / total, ids)

    def probability(self, token: int) -> float:
        """Return the probability of `token`, 0.0 outside the support."""
        place = self._place_of(token)
        return 0.0 if place < 0 else float(self._probs[place])

    def _place_of(self, token: int) -> int:
        """Return the place of a token, -1 if it is not there."""
        self._fill()
        if self._is_dense:
            # A drafter's vocabulary may be shorter: tokens beyond it have no mass.
            return token if 0 <= token < self._size else -1
        low, high, ids = 0, self._size, self._ids
        while low < high:
            middle = (low + high) // 2
            if ids[middle] < token:
                low = middle + 1
            else:
                high = middle
        return low if low < self._size and ids[low] == token else -1

    def _token_in(self, place: int) -> int:
        return place if self._is_dense else int(self._ids[place])

    def token_at(self, uniform: float) -> int:
        """Return the token at `uniform` (in [0, 1)) of the cumulative masses, none of mass 0."""
        self._fill()
        if self._size == 1:
            return self._token_in(0)
        if self._size <= SHORT:
            return self._token_in(_place_at(self._probs, self._size, uniform))
        probs = self.probs
        cumulative = probs.cumsum()
        # Scaling by the last sum absorbs rounding; side "right" steps over entries of zero mass.
        index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
        # The product may round up to the sum itself: the last token with mass is meant.
        if index >= len(cumulative):
            index = int(np.flatnonzero(probs)[-1])
        return self._token_in(index)

    def first_to_arrive(self, key: int) -> int:
        """Return the winner of a race between the tokens, by the SplitMix64 sequence of a key.

        Token i arrives at -log(1 - u) / probs[i], u being number i + 1 of the sequence. So a token
        that truncation drops or adds changes no other token's time.
        """
        self._fill()
        if self._size > SHORT:
            return self._token_in(_first_of_many(self.probs, self.ids, key))
        probs, is_dense, best, best_time = self._probs, self._is_dense, 0, math.inf
        for place in range(self._size):
            rate = probs[place]
            token = place if is_dense else self._ids[place]
            uniform = uniform_of(split_mix(key, token + 1))
            # A token without mass never arrives; -log(1 - u) >= u, so most need no logarithm.
            if rate > 0.0 and uniform < best_time * rate:
                time = -math.log1p(-uniform) / rate
                if time < best_time:
                    best, best_time = place, time
        return self._token_in(best)

    def draw_distinct(self, count: int, word: int, first: int) -> list[int]:
        """Return up to `count` tokens, each drawn from the rest after the earlier ones.

        Draw i takes number 2 (first + i) of the SplitMix64 sequence of `word`. The rest is not
        renormalised: each number is scaled by the new total instead. At most `SHORT` tokens.
        """
        self._fill()
        tokens: list[int] = []
        left, number = _copied(self._probs, self._size), first
        while len(tokens) < count:
            uniform = uniform_of(split_mix(word, 2 * number)) if self._size > 1 else 0.0
            place = _place_at(left, self._size, uniform)
            if place < 0:
                break
            left[place] = 0.0
            tokens.append(self._token_in(place))
            number += 1
        return tokens

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token of highest probability (lowest id among equals) and that probability."""
        self._fill()
        if not self._is_dense and self._size == 1:
            return self._token_in(0), 1.0
        index = int(self.probs.argmax())
        return self._token_in(index), float(self._probs[index])

    def residual(self, draft: Law) -> Law:
        """Return norm(max(0, P - Q)), the distribution after a draw from `draft` was rejected.

        (Leviathan et al. 2023, section 2.3; Chen et al. 2023, equation 2.) If nothing is left, P
        equals Q and a rejection has probability zero: it can only come from rounding, and P itself
        is returned.
        """
        left = self.left_over(draft)
        return self._with(left) if scale_to_one(left) > 0.0 else self

    def left_over(self, draft: Law, share: float = 1.0) -> FloatArray:
        """Return max(0, share P - Q) of the tokens of this distribution, in its order."""
        self._fill()
        draft._fill()
        if self._is_dense or draft._is_dense or self._size > SHORT:
            left = share * self.probs - draft.aligned_to(self)
            np.maximum(left, 0.0, out=left)
            return left
        array = np.empty(self._size)
        out, probs, ids = array, self._probs, self._ids
        others, other_ids = draft._probs, draft._ids
        place, n_drafted = 0, draft._size
        for i in range(self._size):
            token = ids[i]
            while place < n_drafted and other_ids[place] < token:
                place += 1
            drafted = others[place] if place < n_drafted and other_ids[place] == token else 0.0
            over = share * probs[i] - drafted
            out[i] = over if over > 0.0 else 0.0
        return array

    def surplus(self, draft: Law) -> float:
        """Return sum max(0, P - Q): the total variation between two distributions."""
        return float(np.add.reduce(self.left_over(draft)))

    def without(self, token: int) -> Law:
        """Return the distribution without `token`: the residual of a rejected point mass.

        A distribution with no other token is returned as it is: a rejection had probability zero.
        """
        place = self._place_of(token)
        if place < 0:
            return self
        left = _copied(self._probs, self._size)
        left[place] = 0.0
        return self._with(left) if scale_to_one(left) > 0.0 else self

    def _with(self, probs: FloatArray) -> Law:
        """Return the distribution of the same tokens with other probabilities."""
        law = _law_over(_read_by_loops(probs), None if self._is_dense else self._ids, self._size)
        law._held_probs, law._held_ids = probs, self._held_ids
        return law

    def aligned_to(self, other: Law) -> FloatArray:
        """Return this distribution's probabilities of the tokens of `other`, in its order."""
        probs, ids, others = self.probs, self.ids, other.ids
        if others is None:
            dense = np.zeros(len(other.probs))
            if ids is None:
                # Vocabularies may differ by padding: a token that one lacks has no mass there.
                n = min(len(dense), len(probs))
                dense[:n] = probs[:n]
            else:
                inside = ids < len(dense)
                dense[ids[inside]] = probs[inside]
            return dense
        if ids is None:
            inside = others < len(probs)
            # The inner 0 is only a valid index: its value is not used.
            return np.where(inside, probs[np.where(inside, others, 0)], 0.0)
        # One past the end is no index; the last slot then fails the comparison.
        slots = np.minimum(ids.searchsorted(others), len(ids) - 1)
        return np.where(ids[slots] == others, probs[slots], 0.0)


def side_by_side(law: Law, other: Law) -> tuple[FloatArray, FloatArray, IdArray | None]:
    """Return both distributions' probabilities of all tokens of either, and the ids, rising.

    They are None if both distributions have all tokens.
    """
    ids, others = law.ids, other.ids
    if ids is None and others is None and len(law.probs) == len(other.probs):
        return law.probs, other.probs, None
    if ids is not None and others is not None and len(ids) + len(others) <= SHORT:
        return _merged(law, other)
    first, second = (
        np.arange(len(each.probs)) if each.ids is None else each.ids for each in (law, other)
    )
    joint = np.union1d(first, second)
    support = Law(np.zeros(len(joint)), joint)
    return law.aligned_to(support), other.aligned_to(support), joint


def _merged(law: Law, other: Law) -> tuple[FloatArray, FloatArray, IdArray]:
    """Return `side_by_side` of two distributions of few tokens, in one pass over both."""
    room, n, i, j = law._size + other._size, 0, 0, 0
    arrays = np.empty(room), np.empty(room), np.empty(room, np.intp)
    mine, theirs, joint = arrays
    ids, others = law._ids, other._ids
    probs, other_probs = law._probs, other._probs
    while i < law._size or j < other._size:
        in_mine = j == other._size or (i < law._size and ids[i] <= others[j])
        in_theirs = i == law._size or (j < other._size and others[j] <= ids[i])
        joint[n] = ids[i] if in_mine else others[j]
        mine[n], theirs[n] = probs[i] if in_mine else 0.0, other_probs[j] if in_theirs else 0.0
        i, j, n = i + in_mine, j + in_theirs, n + 1
    return arrays[0][:n], arrays[1][:n], arrays[2][:n]


def _read_by_loops(array: npt.NDArray[Any]) -> Any:  # noqa: ANN401 - a list, or a view in C
    """Return an array as loops read it: interpreted ones read a list of Python's numbers faster."""
    return array if _IS_COMPILED or len(array) > SHORT else array.tolist()


def _copied(numbers: FloatArray, size: int) -> FloatArray:
    """Return a copy of numbers that loops read."""
    if size > SHORT:
        return np.array(numbers)
    array = np.empty(size)
    out = array
    for i in range(size):
        out[i] = numbers[i]
    return array


def _law_over(probs: FloatArray, ids: IdArray | None, size: int) -> Law:
    """Return the distribution of numbers as loops read them; arrays are made once they are read."""
    law = Law.__new__(Law)
    law._held_probs = law._held_ids = None
    law._size, law._is_dense, law._probs = size, ids is None, probs
    if ids is not None:
        law._ids = ids
    return law


def _place_at(probs: FloatArray, size: int, uniform: float) -> int:
    """Return the place at `uniform` of the cumulative distribution; -1 if nothing has mass."""
    total, reached, last = 0.0, 0.0, -1
    for i in range(size):
        total += probs[i]
        if probs[i] != 0.0:
            last = i
    wanted = uniform * total
    for i in range(size):
        reached += probs[i]
        if reached > wanted:
            return i
    # The product was rounded up to the sum itself: the last token with mass is meant.
    return last


def _scale(values: FloatArray, start: int, size: int) -> float:
    """Divide up to `SHORT` numbers by their sum, unless that is not positive; return the sum.

    They are added in the order in which numpy adds them.
    """
    a = b = c = d = e = f = g = h = total = 0.0
    end = start + size - size % 8
    for i in range(start, end, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    if end > start:
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(end, start + size):
        total += values[i]
    if total > 0.0:
        for i in range(start, start + size):
            values[i] /= total
    return total


def scale_to_one(weights: FloatArray) -> float:
    """Divide weights by their sum, unless that is not positive; return the sum."""
    size = len(weights)
    if size > SHORT:
        total = float(np.add.reduce(weights))
        if total > 0.0:
            weights /= total
        return total
    return _scale(weights, 0, size)


def _first_of_many(probs: FloatArray, ids: IdArray | None, key: int) -> int:
    """Return the place of the winner of `first_to_arrive` among many tokens."""
    uniforms = _uniforms(len(probs), ids, key)
    best = int(probs.argmax())
    # The likeliest token's time bounds the race: logarithms are taken of its rivals only.
    # u is in [0, 1), so that log(1 - u) is finite where log(u) might not be.
    bound = -math.log1p(-float(uniforms[best])) / float(probs[best])
    # -log(1 - u) >= u, so only these few can arrive before the likeliest token.
    rivals = (uniforms < bound * probs).nonzero()[0]
    if len(rivals):
        times = -np.log1p(-uniforms[rivals]) / probs[rivals]
        first = int(times.argmin())
        if times[first] < bound:
            best = int(rivals[first])
    return best


def _uniforms(size: int, ids: IdArray | None, key: int) -> FloatArray:
    """Return the numbers in [0, 1) of all tokens, as `uniform_of` and `split_mix` give them."""
    words: npt.NDArray[np.uint64]
    # By token id, not by place in the support: truncation then moves no other token's number.
    if ids is None:
        words = _counters(size) + np.uint64(key)
    else:
        # (id + 1) * _GOLDEN + key; ids are not negative, so their bits may be read as unsigned.
        words = ids.view(np.uint64) * np.uint64(_GOLDEN)
        words += np.uint64((key + _GOLDEN) & _WORD)
    words ^= words >> np.uint64(30)
    words *= np.uint64(_MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_MIX_2)
    words ^= words >> np.uint64(31)
    words >>= np.uint64(11)
    uniforms = words.astype(np.float64)
    uniforms *= 2.0**-53
    return uniforms


@functools.lru_cache(maxsize=4)
def _counters(size: int) -> npt.NDArray[np.uint64]:
    # Shared by all draws over a vocabulary of this size, hence read-only.
    counters: npt.NDArray[np.uint64] = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    counters.flags.writeable = False
    return counters


class _Point(Law):
    """The distribution that is sure of a token. Greedy rounds read no arrays of it."""

    __slots__ = ("_token",)

    def __init__(self, token: int) -> None:
        self._token, self._size = token, 0  # until its arrays are made

    def _fill(self) -> None:
        if not self._size:
            self._hold(_CERTAIN, np.array([self._token], np.intp))

    @property
    def size(self) -> int:
        """One token."""
        return 1

    def probability(self, token: int) -> float:
        """Return 1.0 for its token, 0.0 for others."""
        return 1.0 if token == self._token else 0.0

    def token_at(self, uniform: float) -> int:
        """Return its token."""
        return self._token

    @property
    def most_likely(self) -> tuple[int, float]:
        """Its token, of probability 1."""
        return self._token, 1.0


# == Truncation: a row after top-k, top-p and min-p, and its probabilities by temperature ==========


Cuts = tuple[int, float, float, float]
"""Top-k, the share of top-p, the logarithm of min-p, and the temperature."""

FAVOURITE: Cuts = (1, 1.0, -math.inf, 1.0)
"""Cuts that leave the token of the highest logit, of equals the lowest id."""

_ROOM = 8
"""Distributions of one evaluation that lie side by side."""


def require_finite(highest: float) -> None:
    """Raise `DecodeFailedError` unless the highest logit of a model's row is finite."""
    if not math.isfinite(highest):
        problem = f"the model gave logits of {highest}: the file or the backend is broken"
        raise DecodeFailedError(problem, -3)


class Truncation:
    """Makes distributions of the k highest entries of rows, cut further, of up to `room` rows.

    Of the k highest, of equals the lower ids, the likeliest stay up to the one that brings their
    mass to `share` of all (1: all), and of these those no further than `lowest` below the highest.
    """

    def __init__(self, cuts: Cuts, room: int = 1) -> None:
        self._k, self._share, self._lowest, self._temperature = cuts
        self._room, self._used, self._width = room, room, 0

    def law(self, row: Logits, names: npt.NDArray[np.int32] | None = None) -> Law | None:
        """Return the distribution of a row; None if its highest is not finite or one is a NaN.

        `names`, ascending, are the tokens that its entries are of.
        """
        is_usual = row.itemsize == 4  # tests bring rows of 64 bits
        if self._k == 1:
            token = favourite(row) if is_usual else favourite_in_numpy(row)
            if token < 0:
                return None
            return _Point(token if names is None else int(names[token]))
        k = min(self._k, len(row))
        if self._used == self._room or k != self._width:
            self._make_room(k)
        start = self._used * k
        find = rank if is_usual else rank_in_numpy
        if not find(row, self._id_array, self._value_array, self._ordered_array, start):
            return None
        self._used += 1
        end = start + self._cut(start, names)
        if not _IS_COMPILED:
            return Law(self._value_array[start:end], self._id_array[start:end])
        return _law_over(self._values[start:end], self._ids[start:end], end - start)

    def _make_room(self, k: int) -> None:
        room = self._room
        self._id_array, self._value_array = np.empty(room * k, np.intp), np.empty(room * k)
        self._ordered_array = np.empty(k)
        self._ids, self._values = self._id_array, self._value_array
        self._ordered = self._ordered_array
        self._used, self._width = 0, k

    def _cut(self, start: int, names: npt.NDArray[np.int32] | None) -> int:
        """Keep and normalise the ranked entries that the cuts leave; return how many these are."""
        ids, values, ordered = self._ids, self._values, self._ordered
        count = _count_left(ordered, self._width, self._share, self._lowest)
        last, n_last, kept = ordered[count - 1], 0, start
        for i in range(count):
            n_last += ordered[i] == last
        # In the order of their ids: of those that share the lowest value, the lower ids stay.
        for i in range(start, start + self._width):
            value = values[i]
            if value > last or (value == last and n_last > 0):
                n_last -= value == last
                ids[kept] = ids[i] if names is None else names[ids[i]]
                values[kept] = math.exp(value / self._temperature)
                kept += 1
        if count > SHORT:
            scale_to_one(self._value_array[start : start + count])
        else:
            _scale(values, start, count)
        return count


def _count_left(ordered: FloatArray, size: int, share: float, lowest: float) -> int:
    """Return how many of the entries, which descend from 0, top-p and min-p leave."""
    count = size
    if share < 1.0:
        total, reached = 0.0, 0.0
        for i in range(size):
            total += math.exp(ordered[i])
        wanted = share * total
        for i in range(size):
            reached += math.exp(ordered[i])
            if reached >= wanted:
                count = i + 1
                break
    while count > 1 and ordered[count - 1] < lowest:
        count -= 1
    return count


class RowLaws:
    """The distributions of an answer's rows by the cuts of `Truncation`.

    `logits` returns the rows of the tree that was evaluated last: 0 is the root's, i + 1 that of
    node i.
    """

    __slots__ = ("_truncation", "logits")

    def __init__(self, cuts: Cuts, logits: Callable[[int], Logits] | None = None) -> None:
        self._truncation, self.logits = Truncation(cuts, _ROOM), logits

    def __call__(self, node: int) -> Law:
        """Return the distribution after a node of the tree."""
        assert self.logits is not None
        return self.law(self.logits(node + 1))

    def law(self, row: Logits, names: npt.NDArray[np.int32] | None = None) -> Law:
        """Return `Truncation.law` of a row; raises `DecodeFailedError` for a broken one."""
        law = self._truncation.law(row, names)
        if law is None:
            require_finite(float(row.max()))
            raise AssertionError("a finite row that is not ranked")
        return law


# == Tokens that a head ranked =====================================================================


class RankedLaw(Law):
    """Tokens in order, the most likely first, with their log-probabilities in nats, both [ranks].

    Trees of favourites need `best` only, which costs no sorting. As a distribution it is that of
    these tokens alone, renormalised and in the order of their ids, worked out when first read.
    """

    __slots__ = ("_best", "_is_filled", "_log_probs", "_tokens")

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
        best: list[tuple[int, float]] | None = None,
    ) -> None:
        self._tokens, self._log_probs, self._best = tokens, log_probs, best
        self._is_filled = False

    def _fill(self) -> None:
        if not self._is_filled:
            # A distribution's ids ascend, whatever the ranking: see `Law`.
            order = np.argsort(self._tokens)
            weights = np.exp(self._log_probs[order], dtype=np.float64)
            law = Law.normalised(weights, self._tokens[order].astype(np.intp))
            self._hold(law.probs, law.ids)
            self._is_filled = True

    @classmethod
    def of_rows(
        cls, tokens: npt.NDArray[np.int32], log_probs: npt.NDArray[np.float32]
    ) -> list[RankedLaw]:
        """Return the distributions of n rows, both [n, ranks], all computed at once."""
        probs = np.exp(log_probs, dtype=np.float64).tolist()
        rows = zip(tokens, log_probs, tokens.tolist(), probs, strict=True)
        return [cls(row, logs, _without_zeros(named, own)) for row, logs, named, own in rows]

    def best(self, count: int) -> list[tuple[int, float]]:
        """Return the `count` most likely tokens with their probabilities among all, none of 0."""
        if self._best is None:
            probs = np.exp(self._log_probs[:count], dtype=np.float64).tolist()
            return _without_zeros(self._tokens[:count].tolist(), probs)
        return self._best[:count]

    @property
    def most_likely(self) -> tuple[int, float]:
        """The best token with its probability in the whole distribution."""
        best = self.best(1)
        return best[0] if best else super().most_likely


def _without_zeros(tokens: list[int], probs: list[float]) -> list[tuple[int, float]]:
    return [(token, prob) for token, prob in zip(tokens, probs, strict=True) if prob > 0.0]
