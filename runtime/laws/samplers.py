"""llama.cpp's samplers over plain arrays: truncations, temperatures, DRY, mirostat."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from specrun.bindings.models.vocabulary import Vocabulary
    from specrun.runtime.grammar.state import GrammarState


# == Truncations and temperatures over candidates ==================================================
#
# Each function is one of llama.cpp's samplers. None but XTC draws anything: it cuts with a chance,
# and its result is then `without_top_choices`.


FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.intp]
_Number = TypeVar("_Number", np.float32, np.float64)
_GROUPS = 1024
_TINY = 1e-300  # in place of 0 under a logarithm: its factor is 0
_COLDEST = 1e-30  # below it, dividing would overflow, and the distribution is a point mass anyway


@dataclass(slots=True)
class Candidates:
    """Tokens `ids`, ascending, with their logits `values`, finite; both [n], n at least 1.

    Beside them there are `n_forbidden` of logit -inf. As in llama.cpp they are still candidates
    where these are counted: by top-k, and by the entropy that dynamic temperature takes for the
    largest.
    """

    ids: IdArray
    values: FloatArray
    n_forbidden: int = 0

    def kept(self, places: IdArray | npt.NDArray[np.bool_], n_forbidden: int = 0) -> Candidates:
        """Return those at these places, in the order of their ids."""
        chosen = places if places.dtype == np.bool_ else np.sort(places)
        return Candidates(self.ids[chosen], self.values[chosen], n_forbidden)

    def probabilities(self) -> FloatArray:
        """Return softmax(values)."""
        weights: FloatArray = self.values - self.values.max()
        np.exp(weights, out=weights)
        weights /= weights.sum()
        return weights

    def ranking(self) -> IdArray:
        """Return the places, the highest logit first; of equals the lower id first."""
        return np.argsort(-self.values, kind="stable")


def allowed(values: npt.NDArray[np.floating], ids: IdArray | None = None) -> Candidates:
    """Return the tokens of a row (or of `ids`, at these places of it) as candidates."""
    if ids is not None:
        values = values[ids]
    finite = values > -math.inf
    n_forbidden = len(values) - int(np.count_nonzero(finite))
    if n_forbidden:
        ids, values = finite.nonzero()[0] if ids is None else ids[finite], values[finite]
    if ids is None:
        ids = np.arange(len(values))
    return Candidates(ids, values.astype(np.float64), n_forbidden)


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """Return the k highest."""
    values, n = candidates.values, len(candidates.values)
    if k >= n:
        left = min(candidates.n_forbidden, k - n)
        return Candidates(candidates.ids, values, left)
    few = not_below_highest(values, k)
    if few is not None and len(few) < n:
        return keep_top_k(candidates.kept(few), k)
    lowest = np.partition(values, n - k)[n - k]
    kept = values > lowest
    # Of those that equal the k-th highest, the lower ids stay.
    equal = (values == lowest).nonzero()[0]
    kept[equal[: k - int(np.count_nonzero(kept))]] = True
    return candidates.kept(kept)


def not_below_highest(values: npt.NDArray[np.floating], k: int) -> IdArray | None:
    """Return the places, ascending, of the k highest values and few others; None stands for all.

    A sort of the whole row would cost more than the rest of a round. Instead the row is cut into
    groups: the k-th highest group maximum is a bound that k entries reach and every one of the k
    highest entries too, so only the entries that reach it, few more than k, are ever sorted.
    """
    # The rest of the groups has no part in the bound, but is compared with it too.
    length = -(-len(values) // _GROUPS)
    groups = len(values) // length
    if groups < 2 * k or length < 2:
        return None
    # Entry j of each stretch of `groups` entries is in group j: numpy runs along whole stretches.
    maxima = np.maximum.reduce(values[: length * groups].reshape(length, groups), axis=0)
    maxima.partition(groups - k)
    candidates = values < maxima[groups - k]
    # The inverse of "below", because NaN is not below anything: it stays and is seen.
    np.logical_not(candidates, out=candidates)
    places: IdArray = candidates.nonzero()[0]
    return places


def keep_top_p(candidates: Candidates, top_p: float) -> Candidates:
    """Return the most likely, up to the one that brings their mass to `top_p` (Holtzman 2020)."""
    order = candidates.ranking()
    cumulative = candidates.probabilities()[order].cumsum()
    count = int(cumulative.searchsorted(top_p * cumulative[-1])) + 1
    return candidates.kept(order[:count])


def keep_min_p(candidates: Candidates, min_p: float) -> Candidates:
    """Return those of at least `min_p` times the largest probability."""
    values = candidates.values
    return candidates.kept(values - values.max() >= math.log(min_p))


def keep_typical(candidates: Candidates, typical_p: float) -> Candidates:
    """Return the tokens whose surprise is nearest to the entropy, of a mass over `typical_p`.

    (Locally typical sampling, Meister et al. 2023, equation 6.) With 0 log 0 = 0, where llama.cpp's
    entropy is not a number as soon as a candidate has no mass.
    """
    probs = candidates.probabilities()
    surprise = -np.log(np.maximum(probs, _TINY))
    entropy = float(np.sum(probs * surprise))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = probs[order].cumsum()
    count = int(cumulative.searchsorted(typical_p, side="right")) + 1
    return candidates.kept(order[:count])


def keep_above_sigma(candidates: Candidates, n_sigma: float) -> Candidates:
    """Forbid logits under max - n_sigma standard deviations (top-n-sigma, Tang et al. 2024)."""
    values = candidates.values
    if len(values) < 2:
        return candidates
    kept = values >= float(values.max()) - n_sigma * float(values.std())
    left = candidates.kept(kept)
    left.n_forbidden = candidates.n_forbidden + len(values) - len(left.values)
    return left


def without_top_choices(candidates: Candidates, threshold: float) -> Candidates | None:
    """Return XTC's tokens when it cuts: of the likely tokens the least likely, and all others.

    Likely are those of probability `threshold` and more. None if there are fewer than two of
    these: nothing is cut then.
    """
    likely = (candidates.probabilities() >= threshold).nonzero()[0]
    if len(likely) < 2:
        return None
    kept = np.ones(len(candidates.values), bool)
    kept[likely] = False
    values = candidates.values[likely]
    kept[likely[(values == values.min()).nonzero()[0][-1]]] = True
    return candidates.kept(kept, candidates.n_forbidden)


def tempered(candidates: Candidates, temperature: float) -> Candidates:
    """Return logits / temperature; at 0 the highest alone has mass.

    Nothing is added to them: the repeat penalty, which may follow, goes by their signs.
    """
    values = candidates.values
    if temperature > 0.0:
        with np.errstate(over="ignore"):
            scaled = values / max(temperature, _COLDEST)
        if np.isfinite(scaled).all():
            return Candidates(candidates.ids, scaled, candidates.n_forbidden)
        # So cold that the highest alone have mass, after other temperatures.
        highest = values == values.max()
        return candidates.kept(highest, candidates.n_forbidden + int(np.sum(~highest)))
    others = candidates.n_forbidden + len(values) - 1
    return candidates.kept(np.array([values.argmax()]), others)


def tempered_by_entropy(
    candidates: Candidates, temperature: float, spread: float, exponent: float
) -> Candidates:
    """Return logits over a temperature in temperature +- spread, the higher the less sure they are.

    Its place there is (entropy / log n) ** exponent, n the number of candidates.
    """
    n = len(candidates.values) + candidates.n_forbidden
    if n < 2:
        return candidates
    probs = candidates.probabilities()
    entropy = -float(np.sum(probs * np.log(np.maximum(probs, _TINY))))
    share = max(0.0, entropy) / math.log(n)
    lowest, highest = max(0.0, temperature - spread), temperature + spread
    return tempered(candidates, lowest + (highest - lowest) * share**exponent)


def penalise_tokens(
    candidates: Candidates, window: Sequence[int], repeat: float, frequency: float, presence: float
) -> Candidates:
    """Apply repeat, frequency and presence penalties to the candidates that are in a window."""
    counts = Counter(window)
    tokens = np.fromiter(counts, np.intp, len(counts))
    times = np.fromiter(counts.values(), np.float64, len(counts))
    places, present = _places_of(tokens, candidates.ids)
    values = candidates.values.copy()
    values[places] = penalised(values[places], times[present], repeat, frequency, presence)
    return Candidates(candidates.ids, values, candidates.n_forbidden)


def penalised(
    values: npt.NDArray[_Number],
    times: npt.NDArray[_Number],
    repeat: float,
    frequency: float,
    presence: float,
) -> npt.NDArray[_Number]:
    """Return the logits of tokens that occurred so many times (CTRL, Keskar 2019, section 4.1)."""
    number = values.dtype.type
    scale = number(repeat)
    # Dividing a negative logit would raise it: it is multiplied, as in llama.cpp.
    scaled = np.where(values <= 0, values * scale, values / scale)
    left: npt.NDArray[_Number] = scaled - times * number(frequency) - number(presence)
    return left


def lowered(candidates: Candidates, amounts: dict[int, float]) -> Candidates:
    """Return logits minus an amount for each of these tokens."""
    tokens = np.fromiter(amounts, np.intp, len(amounts))
    places, present = _places_of(tokens, candidates.ids)
    values = candidates.values.copy()
    values[places] -= np.fromiter(amounts.values(), np.float64, len(amounts))[present]
    return Candidates(candidates.ids, values, candidates.n_forbidden)


def _places_of(tokens: IdArray, ids: IdArray) -> tuple[IdArray, npt.NDArray[np.bool_]]:
    """Return the places of those tokens that are among the ascending ids, and which those are."""
    places = np.minimum(ids.searchsorted(tokens), len(ids) - 1)
    present = ids[places] == tokens
    return places[present], present


# == DRY: penalties for tokens that continue a repetition, exponential in its length ===============
#
# A repetition is a suffix of the last tokens that stands further up among them, too; sequence
# breakers end it. After p-e-w's proposal for text-generation-webui, as llama.cpp has it.


Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Sequences that break a repetition: those that begin with a token, by it, without it."""

_LONGEST_TEXT = 40
_LONGEST_TAIL = 20
_LARGEST_FLOAT, _LOG_LARGEST_FLOAT = 3.4e38, 88.7228391


def repetition_penalties(
    tokens: Sequence[int], breakers: Breakers, *, multiplier: float, base: float, allowed: int
) -> dict[int, float]:
    """Return the loss of each token's logit after these: multiplier * base^(length - allowed).

    The length is that of the longest suffix of `tokens` which that token followed before; shorter
    ones than `allowed` cost nothing. Breakers of one token are never penalised.
    """
    if len(tokens) <= allowed:
        return {}
    limit = _since_breaker(tokens, breakers)
    if limit < allowed:
        return {}
    most = int(_LOG_LARGEST_FLOAT / math.log(base)) if base > 1.000001 else 0
    penalties = {}
    for token, length in _longest_repeats(tokens, limit, allowed).items():
        if () not in breakers.get(token, ()):
            excess = length - allowed
            amount = multiplier * base ** (min(excess, most) if most else excess)
            penalties[token] = max(-_LARGEST_FLOAT, min(amount, _LARGEST_FLOAT))
    return penalties


def _since_breaker(tokens: Sequence[int], breakers: Breakers) -> int:
    """Return how many tokens there are after the last breaker; all, if there is none."""
    n = len(tokens)
    for back in range(n):
        tails = breakers.get(tokens[n - 1 - back])
        if tails is None:
            continue
        after = tokens[n - back :]
        fits = [len(tail) for tail in tails if tuple(after[: len(tail)]) == tail]
        if fits:
            return back - max(fits)
    return n


def _longest_repeats(tokens: Sequence[int], limit: int, allowed: int) -> dict[int, int]:
    """Return, for each token that followed one, the longest suffix (up to `limit`) it followed."""
    longest: dict[int, int] = {}
    newest_first = tokens[::-1]
    for place, length in enumerate(_common_beginnings(newest_first)):
        length = min(length, limit)
        if place and length >= allowed:
            following = newest_first[place - 1]
            longest[following] = max(length, longest.get(following, 0))
    return longest


def _common_beginnings(text: Sequence[int]) -> list[int]:
    """Return how much of its beginning the text has at each place: the Z-algorithm, linear time."""
    n = len(text)
    lengths = [n] + [0] * (n - 1)
    left = right = 0  # the match that reaches furthest is text[left:right]
    for place in range(1, n):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < n and text[length] == text[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return lengths


@functools.lru_cache(maxsize=8)
def sequence_breakers(vocabulary: Vocabulary, texts: tuple[str, ...]) -> Breakers:
    """Return the token sequences in which one of the texts is spelled.

    A token that has a whole text in it breaks alone; one that ends with a beginning of it does so
    before the tokens of the rest. All of a vocabulary is looked at: a fraction of a second.
    """
    breakers: dict[int, list[tuple[int, ...]]] = {}
    wanted = [text.encode()[:_LONGEST_TEXT] for text in texts]
    for token in range(vocabulary.size):
        spelled = vocabulary.spelled(token)
        for text in wanted:
            for tail in _tails(spelled, text, vocabulary):
                known = breakers.setdefault(token, [])
                if tail not in known:
                    known.append(tail)
    return breakers


def _tails(spelled: bytes, text: bytes, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """Return the possible continuations after a token whose text stands in both together."""
    if text in spelled:
        return [()]
    begun = [n for n in range(len(text) - 1, 0, -1) if spelled.endswith(text[:n])]
    rests = (vocabulary.tokenize(text[n:], add_special=False) for n in begun)
    return [tuple(rest[:_LONGEST_TAIL]) for rest in rests]


# == Mirostat (Basu et al. 2021): truncation that keeps the text's surprise near tau bits ==========
#
# A number mu, twice tau at first, bounds the surprise of the next token; after each token it moves
# against the error of that token's surprise. Version 2 (algorithm 2) cuts at mu itself, version 1
# (algorithm 1) at the k that Zipf's law expects for it. mu depends on tokens and distributions
# alone, so a node of a draft tree has one of its own: that of the text down to it.


_RANKS = 100  # from which version 1 estimates the exponent of Zipf's law; llama.cpp's m


def keep_unsurprising(candidates: Candidates, mu: float) -> Candidates:
    """Return the tokens whose surprise is at most `mu` bits, or else the likeliest (version 2)."""
    values = candidates.values
    # -log2 softmax(x) <= mu, in nats.
    shifted = values - values.max()
    total = math.log(float(np.exp(shifted).sum()))
    kept = shifted >= total - mu * math.log(2.0)
    if not kept.any():
        return candidates.kept(np.array([values.argmax()]))
    return candidates.kept(kept)


def keep_zipf(candidates: Candidates, mu: float, n_vocab: int) -> Candidates:
    """Return the k likeliest, k estimated for an expected surprise of `mu` bits (version 1)."""
    ranked = np.sort(keep_top_k(candidates, _RANKS).values)[::-1]
    if len(ranked) < 2:
        return candidates
    # The slope of log p over log rank, by least squares between neighbours.
    rises = [math.log((rank + 2) / (rank + 1)) for rank in range(len(ranked) - 1)]
    falls = (ranked[:-1] - ranked[1:]).tolist()
    exponent = sum(t * b for t, b in zip(rises, falls, strict=True)) / sum(t * t for t in rises)
    return keep_top_k(candidates, _zipf_k(exponent, mu, n_vocab))


def _zipf_k(exponent: float, mu: float, n_vocab: int) -> int:
    """Return ((e 2^mu) / (1 - n_vocab^-e))^(1/s) with e = s - 1 (equation 2), from 1 to n_vocab.

    If that is too large for C's int, llama.cpp keeps a single token: here all are kept.
    """
    if exponent <= 0.0:  # a flat row
        return n_vocab
    rest = exponent - 1.0
    try:
        # -expm1(-e log n) / e is log n if e is 0.
        mass = -math.expm1(-rest * math.log(n_vocab)) / rest if rest else math.log(n_vocab)
        k = (2.0**mu / mass) ** (1.0 / exponent)
    except OverflowError:
        return n_vocab
    return max(1, int(min(k, n_vocab)))


def mu_after(mu: float, probability: float, tau: float, eta: float) -> float:
    """Return mu after a token that the truncated distribution gave this probability."""
    if probability <= 0.0:  # a node that no text reaches: any mu will do
        return mu
    return mu - eta * (-math.log2(probability) - tau)


# == Sampler state of one answer: DRY's breakers, mirostat's mu, the grammar =======================


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state of an answer's samplers, on which its distributions depend beside rows and tokens.

    `breakers` are those of `Breakers`. `mu` is mirostat's, in bits, after the tokens that were
    accepted; None at the beginning of an answer. `grammar` is the place after those tokens, or an
    earlier one; None if any text is allowed.
    """

    breakers: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    mu: float | None = None
    grammar: GrammarState | None = None

    def with_mu(self, mu: float) -> SamplerState:
        """Return the state with another mu."""
        return dataclasses.replace(self, mu=mu)

    def at(self, grammar: GrammarState | None) -> SamplerState:
        """Return the state at another place of the grammar."""
        return self if grammar is self.grammar else dataclasses.replace(self, grammar=grammar)


FRESH = SamplerState()
"""The state at the beginning of an answer, without sequence breakers."""
