"""Random draws for acceptance and drafting, hashed from an answer's key and a token's position.

The token at position p is decided once, by draws keyed with (key, p). Plain decoding and every
drafter of point masses therefore make the same choice from the same law: their texts agree at any
temperature. An answer's key is a hash of (seed, index, prompt): with the seed alone, a text that
comes back in a prompt at other positions would meet the numbers that made it, and repeat itself.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.runtime.compiled import LOOPS, Draws, Methods
from specrun.runtime.laws.law import SHORT, Law, made_law

Words = npt.NDArray[np.uint64]
# The increment and the multipliers of SplitMix64 (Steele, Lea and Flood 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Python's integers for single numbers: numpy's scalars warn when a product wraps around.
_GOLDEN_INT, _MIX_1_INT, _MIX_2_INT = int(_GOLDEN), int(_MIX_1), int(_MIX_2)
_WORD = 0xFFFFFFFFFFFFFFFF
# The last one is not SplitMix64's: it leaves the 53 bits that a float64 holds.
_SHIFTS = tuple(np.uint64(bits) for bits in (30, 27, 31, 11))


class NoiseSource(Protocol):
    """All that rules and drafters may draw from; tests pass one that enumerates every outcome."""

    def seek(self, position: int) -> None:
        """Turn to the draws that decide the token at `position`."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability."""

    def choose(self, law: Law) -> int:
        """Return a token drawn from `law`."""

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return an independent source for what is drafted in the round that starts at a position.

        A position may be drafted in several rounds, so its draws are keyed by the round as well.
        """


class SeededNoise:
    """Counter-based noise: every draw is a hash of (key, stream, position, number of the draw).

    blake2b keyed by a counter has no state to save, needs no order of draws, and costs about a
    microsecond. Of `key`, any whole number, 64 bits count.
    """

    # As of a new one: every round makes one for drafting, most of which nobody asks.
    _position = _accepts = _choices = 0
    _word: int | None = None

    def __init__(self, key: int, stream: int = 0) -> None:
        self._key = key & _WORD
        self._stream = stream

    @staticmethod
    def for_answer(seed: int, prompt: Sequence[int], index: int = 0) -> SeededNoise:
        """Return the noise of the answer number `index` to a prompt's tokens.

        Another seed, index or prompt gives independent draws: the keys are hashes of 64 bits.
        """
        # As text, because a seed may have any number of digits; the blanks end seed and index.
        digest = hashlib.blake2b(f"{seed} {index} ".encode(), digest_size=8)
        digest.update(np.array(prompt, "<i8").tobytes())
        return SeededNoise(int.from_bytes(digest.digest(), "little"))

    @property
    def source(self) -> tuple[int, int]:
        """The key and the stream: with a position, all that its draws are made of."""
        return self._key, self._stream_number()

    def seek(self, position: int) -> None:
        """Turn to the draws of `position`."""
        self._position = position
        self._accepts = self._choices = 0
        self._word = None

    def accept(self, probability: float) -> bool:
        """Return True with the given probability, by the next acceptance draw of this position."""
        # Ratios come unclipped: this is the min(1, P/Q) of the papers.
        if probability >= 1.0:
            return True
        self._accepts += 1
        # Tests take the odd numbers, choices the even ones: none decides twice.
        return (self._hash(2 * self._accepts + 1) >> 11) * 2.0**-53 < probability

    def choose(self, law: Law) -> int:
        """Return a token of `law`, the winner of a race between its tokens.

        Token i arrives after an exponential time of rate probs[i], made from a hash of the position
        and i; the first to arrive is a draw from the law (Gumbel-max in other words). Backends
        round batches differently, and one uniform number on the cumulative law would feel every
        such difference; here the choice changes with about the probability by which the laws
        differ, and a token that truncation drops or adds changes nobody else's time.
        """
        size = len(law.probs)
        if size == 1:
            return law.token_at(0.0)
        self._choices += 1
        key = self._hash(2 * self._choices)
        if LOOPS is not None and size <= SHORT:
            return LOOPS.race(law.probs, law.ids, key)
        uniforms = _uniforms(law, key)
        if len(uniforms) <= SHORT:
            best = _first_to_arrive(uniforms.tolist(), law.probs.tolist())
            return best if law.ids is None else int(law.ids[best])
        best = int(law.probs.argmax())
        # The likeliest token's time bounds the race: logarithms are taken of its rivals only.
        # u is in [0, 1), so that log(1 - u) is finite where log(u) might not be.
        bound = -math.log1p(-float(uniforms[best])) / float(law.probs[best])
        # -log(1 - u) >= u, so only these few can arrive before the likeliest token.
        rivals = (uniforms < bound * law.probs).nonzero()[0]
        if len(rivals):
            times = -np.log1p(-uniforms[rivals]) / law.probs[rivals]
            first = int(times.argmin())
            if times[first] < bound:
                best = int(rivals[first])
        return best if law.ids is None else int(law.ids[best])

    def for_drafting(self, round_start: int) -> DraftNoise:
        """Return the drafting stream of the round that starts at `round_start`.

        It depends on this source's own stream: a drafter that drafts for a drafter draws other
        numbers.
        """
        return DraftNoise(self._key, self._stream, round_start)

    def _stream_number(self) -> int:
        return self._stream

    def _hash(self, index: int) -> int:
        """Return 64 bits: number `index` of the position's own SplitMix64 sequence."""
        word = (self._position_word() + index * _GOLDEN_INT) & _WORD
        word = ((word ^ (word >> 30)) * _MIX_1_INT) & _WORD
        word = ((word ^ (word >> 27)) * _MIX_2_INT) & _WORD
        return word ^ (word >> 31)

    def _position_word(self) -> int:
        if self._word is None:
            # blake2b once a position: its further numbers are SplitMix64's, which cost less.
            if LOOPS is not None:
                self._word = LOOPS.digest(self._key, self._stream_number(), self._position)
                return self._word
            key = struct.pack("<Qqq", self._key, self._stream_number(), self._position)
            self._word = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return self._word


class DraftNoise(SeededNoise):
    """Noise for drafts, which no run has to repeat: one uniform number on the cumulative law.

    It is that of the round that starts at `round_start`, for the drafts of who draws from `stream`.
    """

    _own_stream: int | None = None

    def __init__(self, key: int, stream: int, round_start: int) -> None:
        self._key, self._stream, self._round_start = key & _WORD, stream, round_start

    def _stream_number(self) -> int:
        # When it is first asked for: most rounds' drafts are point masses, which draw nothing.
        if self._own_stream is None:
            if LOOPS is not None:
                number = LOOPS.digest(self._stream, self._round_start)
                self._own_stream = number - (number >> 63 << 64)  # with a sign
                return self._own_stream
            key = struct.pack("<qq", self._stream, self._round_start)
            digest = hashlib.blake2b(key, digest_size=8).digest()
            self._own_stream = int.from_bytes(digest, "little", signed=True)
        return self._own_stream

    def for_drafting(self, round_start: int) -> DraftNoise:
        """Return the drafting stream of whoever drafts for this one's drafter."""
        return DraftNoise(self._key, self._stream_number(), round_start)

    def choose(self, law: Law) -> int:
        """Return a token of `law` by the next choice draw of this position."""
        size = len(law.probs)
        if size == 1:
            return law.token_at(0.0)
        if LOOPS is not None and size <= SHORT:
            self._choices += 1
            numbers = self._position_word(), self._choices
            return LOOPS.draw_distinct(law.probs, law.ids, 1, numbers)[0]
        return law.token_at(self._next_uniform())

    def choose_distinct(self, law: Law, count: int) -> list[int]:
        """Return up to `count` tokens, each drawn from what the earlier ones left of `law`.

        The same numbers give the same tokens as `choose` and `Law.without` in turn. A truncated law
        has a few dozen tokens, over which plain Python is several times quicker than a numpy call
        for every step.
        """
        if len(law.probs) > SHORT:
            return choose_in_turn(self, law, count)
        if LOOPS is not None:
            word = self._position_word() if self._word is None else self._word
            tokens = LOOPS.draw_distinct(law.probs, law.ids, count, (word, self._choices + 1))
            # A law of one token asks for no number, here as in `choose`.
            self._choices += len(tokens) if len(law.probs) > 1 else 0
            return tokens
        weights = law.probs.tolist()
        places: list[int] = []
        while len(places) < count:
            cumulative = list(accumulate(weights))
            total = cumulative[-1]
            if not total > 0.0:
                break
            place = 0
            if len(weights) > 1:
                place = bisect_right(cumulative, self._next_uniform() * total)
            if place == len(weights):  # by rounding
                place = max(index for index, weight in enumerate(weights) if weight > 0.0)
            # The rest is not renormalised: the next number is scaled by the new total instead.
            weights[place] = 0.0
            places.append(place)
        return places if law.ids is None else law.ids[places].tolist()

    def _next_uniform(self) -> float:
        self._choices += 1
        return (self._hash(2 * self._choices) >> 11) * 2.0**-53


class NotedNoise:
    """Another source's decisions, noted: a walk that is begun again is decided as it was before."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._decisions: list[int] = []
        self._given = 0  # how many of them were asked for, since the walk began

    def again(self) -> NotedNoise:
        """Begin again: the decisions so far come first, then the source's next ones."""
        self._given = 0
        return self

    def seek(self, position: int) -> None:
        """Turn the source to the draws of `position`, unless its decisions there are known."""
        if self._given == len(self._decisions):
            self._source.seek(position)

    def accept(self, probability: float) -> bool:
        """Return True with the given probability."""
        return bool(self._next(lambda: self._source.accept(probability)))

    def choose(self, law: Law) -> int:
        """Return a token drawn from `law`."""
        return self._next(lambda: self._source.choose(law))

    def for_drafting(self, round_start: int) -> NoiseSource:
        """Return the source's own for drafts."""
        return self._source.for_drafting(round_start)

    def _next(self, decide: Callable[[], int]) -> int:
        if self._given == len(self._decisions):
            self._decisions.append(decide())
        self._given += 1
        return self._decisions[self._given - 1]


def methods_of(noise: NoiseSource) -> Methods:
    """Return what compiled code calls for the decisions of any source."""
    return noise.seek, noise.accept, lambda law: noise.choose(made_law(law))


def draws_of(noise: NoiseSource, start: int, count: int) -> Draws:
    """Return what compiled code draws by: the numbers of a `DraftNoise`, or any source's methods.

    The first draw is for position `start`, and `count` positions follow each other.
    """
    if type(noise) is DraftNoise:
        return (*noise.source, start, count)
    return (*methods_of(noise), start, count)


def choose_in_turn(noise: NoiseSource, law: Law, count: int) -> list[int]:
    """Return up to `count` different tokens, each chosen from what the earlier ones left."""
    if LOOPS is not None and len(law.probs) <= SHORT:
        return LOOPS.draw_distinct(law.probs, law.ids, count, methods_of(noise))
    tokens: list[int] = []
    while True:
        tokens.append(noise.choose(law))
        if len(tokens) == count:
            return tokens
        rest = law.without(tokens[-1])
        if rest is law:  # the law was sure of this token: it is exhausted
            return tokens
        law = rest


def _first_to_arrive(uniforms: list[float], rates: list[float]) -> int:
    """Return the winner of `SeededNoise.choose`'s race over lists: quicker for a few tokens."""
    best, best_time = 0, math.inf
    for index, rate in enumerate(rates):
        # A token without mass never arrives.
        if rate > 0.0:
            time = -math.log1p(-uniforms[index]) / rate
            if time < best_time:
                best, best_time = index, time
    return best


@functools.lru_cache(maxsize=4)
def _counters(size: int) -> Words:
    # Shared by all draws over a vocabulary of this size, hence read-only.
    counters: Words = np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN
    counters.flags.writeable = False
    return counters


def _uniforms(law: Law, key: int) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each token of the support: SplitMix64's output `token`."""
    # By token id, not by place in the support: truncation then moves nobody else's number.
    if law.ids is None:
        words = _counters(len(law.probs)) + np.uint64(key)
    else:
        # (id + 1) * _GOLDEN + key; ids are not negative, so their bits may be read as unsigned.
        words = law.ids.view(np.uint64) * _GOLDEN
        words += np.uint64((key + _GOLDEN_INT) & _WORD)
    words ^= words >> _SHIFTS[0]
    words *= _MIX_1
    words ^= words >> _SHIFTS[1]
    words *= _MIX_2
    words ^= words >> _SHIFTS[2]
    words >>= _SHIFTS[3]
    uniforms = words.astype(np.float64)
    uniforms *= 2.0**-53
    return uniforms
