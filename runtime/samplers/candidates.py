"""Truncations and temperatures over candidates: a row's tokens with their logits, step by step.

Each function is one of llama.cpp's samplers. None but XTC draws anything: it cuts with a chance,
and what it leaves where it cuts is `without_top_choices`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IdArray = npt.NDArray[np.intp]
_Values = TypeVar("_Values", bound=npt.NDArray[np.floating])


@dataclass(slots=True)
class Candidates:
    """Tokens `ids`, ascending, with their logits `values`, float64; both [n], n at least 1.

    As in llama.cpp, a token of logit -inf is still a candidate: it counts where candidates are
    counted (`top_k`, the entropy that dynamic temperature takes for the largest). The highest logit
    is finite.
    """

    ids: IdArray
    values: FloatArray

    def kept(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Candidates:
        """Return those at these places, in the order of their ids."""
        if places.dtype != np.bool_:
            places = np.sort(places)
        return Candidates(self.ids[places], self.values[places])

    def probabilities(self) -> FloatArray:
        """Return softmax(values)."""
        weights = np.exp(self.values - self.values.max())
        return np.asarray(weights / weights.sum())

    def ranking(self) -> IdArray:
        """Return the places, the highest logit first; of equals the lower id first."""
        return np.argsort(-self.values, kind="stable")


def keep_top_k(candidates: Candidates, k: int) -> Candidates:
    """Return the k highest."""
    values, n = candidates.values, len(candidates.values)
    if k >= n:
        return candidates
    lowest = np.partition(values, n - k)[n - k]
    kept = values > lowest
    # Of those that equal the k-th highest, the lower ids stay.
    equal = (values == lowest).nonzero()[0]
    kept[equal[: k - int(np.count_nonzero(kept))]] = True
    return candidates.kept(kept)


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
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    has_mass = probs > 0.0
    entropy = float(np.sum(probs[has_mass] * surprise[has_mass]))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    cumulative = probs[order].cumsum()
    count = int(cumulative.searchsorted(typical_p, side="right")) + 1
    return candidates.kept(order[:count])


def mask_below_sigma(candidates: Candidates, n_sigma: float) -> Candidates:
    """Forbid logits under max - n_sigma standard deviations (top-n-sigma, Tang et al. 2024)."""
    values = candidates.values
    if len(values) < 2:
        return candidates
    finite = values[values > -math.inf]
    lowest = float(finite.max()) - n_sigma * float(finite.std())
    return Candidates(candidates.ids, np.where(values < lowest, -math.inf, values))


def without_top_choices(candidates: Candidates, threshold: float) -> Candidates | None:
    """Return what is left where XTC cuts: all but the likeliest one stays below them.

    Of the tokens of probability `threshold` and more only the least likely stays. None where there
    are fewer than two of these: nothing is cut then.
    """
    probs = candidates.probabilities()
    n_likely = int(np.count_nonzero((probs >= threshold) & (probs > 0.0)))
    if n_likely < 2:
        return None
    return candidates.kept(candidates.ranking()[n_likely - 1 :])


def tempered(candidates: Candidates, temperature: float) -> Candidates:
    """Return logits / temperature; at 0 the highest alone has mass."""
    values = candidates.values
    highest = float(values.max())
    if temperature > 0.0:
        # The highest becomes 0, so that nothing overflows however cold it is.
        with np.errstate(over="ignore"):
            return Candidates(candidates.ids, (values - highest) / max(temperature, 1e-30))
    certain = np.full(len(values), -math.inf)
    certain[int(values.argmax())] = highest
    return Candidates(candidates.ids, certain)


def tempered_by_entropy(
    candidates: Candidates, temperature: float, spread: float, exponent: float
) -> Candidates:
    """Return logits over a temperature in temperature +- spread, the higher the less sure they are.

    Its place there is (entropy / log n) ** exponent, n the number of candidates.
    """
    probs, n = candidates.probabilities(), len(candidates.values)
    if n < 2:
        return candidates
    probs = probs[probs > 0.0]
    share = max(0.0, -float(np.sum(probs * np.log(probs)))) / math.log(n)
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
    return Candidates(candidates.ids, values)


def penalised(
    values: _Values, times: _Values, repeat: float, frequency: float, presence: float
) -> _Values:
    """Return the logits of tokens that were said so many times (CTRL, Keskar 2019, section 4.1)."""
    number = values.dtype.type
    scale = number(repeat)
    # Dividing a negative logit would raise it: it is multiplied, as in llama.cpp.
    values = np.where(values <= 0, values * scale, values / scale)  # type: ignore[assignment]
    values -= times * number(frequency)
    return values - number(presence)  # type: ignore[no-any-return]


def lowered(candidates: Candidates, amounts: dict[int, float]) -> Candidates:
    """Return logits minus an amount for each of these tokens."""
    tokens = np.fromiter(amounts, np.intp, len(amounts))
    places, present = _places_of(tokens, candidates.ids)
    values = candidates.values.copy()
    values[places] -= np.fromiter(amounts.values(), np.float64, len(amounts))[present]
    return Candidates(candidates.ids, values)


def _places_of(tokens: IdArray, ids: IdArray) -> tuple[IdArray, npt.NDArray[np.bool_]]:
    """Return the places of those tokens that are among the ascending ids, and which those are."""
    places = np.minimum(ids.searchsorted(tokens), len(ids) - 1)
    present = ids[places] == tokens
    return places[present], present
