"""Logits to a distribution: a grammar's mask, logit bias, then llama.cpp's samplers in order.

The same function serves the target and a draft model, so that both distributions are cut the same
way. The usual settings (penalties, top-k, top-p, min-p, temperature) have quick ways of their own;
all else runs down the chain of samplers. If one draws (XTC cuts with a chance), the distribution
is the mixture of both outcomes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.laws import samplers as steps
from specrun.runtime.laws.law import (
    FAVOURITE,
    Cuts,
    FloatArray,
    IdArray,
    Law,
    RowLaws,
    Truncation,
    require_finite,
    scale_to_one,
)
from specrun.runtime.laws.rows import MOST_RANKED, Logits
from specrun.runtime.laws.samplers import (
    FRESH,
    Candidates,
    SamplerState,
    keep_unsurprising,
    keep_zipf,
    not_below_highest,
    penalised,
    repetition_penalties,
)
from specrun.runtime.laws.sampling import COLDEST, SamplingParams

if TYPE_CHECKING:
    from specrun.runtime.grammar.state import GrammarState


def transformed_law(
    logits: Logits,
    params: SamplingParams,
    window: Sequence[int] = (),
    state: SamplerState = FRESH,
) -> Law:
    """Return the distribution that `params` make of one row of logits, float32 [n_vocab].

    `window` are the tokens that penalties look at, oldest first (see `penalty_window`), `state` is
    that of DRY, mirostat and a grammar. Raises `OptionError` for settings that
    leave no token, `DecodeFailedError` for a broken row.
    """
    cuts = row_cuts(params)
    if cuts is not None and state.grammar is None:  # as most distributions are
        return _ranked(logits, logits, params, cuts)
    if params.is_greedy:
        return Law.point(greedy_token(logits, params, window, state))
    if state.grammar is not None:
        logits, window = _under_grammar(state.grammar, logits, params, window)
    if not params.is_plain:
        return _law_of_chain(logits, params, window, state)
    row, logits = logits, _adjusted(logits, params, window)
    # llama.cpp's order has the temperature last: the cuts are made on the untempered distribution.
    if 0 < params.top_k <= MOST_RANKED:
        return _ranked(logits, row, params, params.cuts)
    if 0 < params.top_k < len(logits):
        ids = not_below_highest(logits, params.top_k)
    elif params.top_p < 1.0:
        ids = None
    else:
        return _untruncated(logits, row, params)
    return _truncated(logits, ids, row, params)


def row_cuts(params: SamplingParams) -> Cuts | None:
    """Return the cuts of `Truncation`, if it alone makes the distribution of a row; else None."""
    if params.is_cut:
        return params.cuts if params.top_k <= MOST_RANKED else None
    is_alone = params.is_greedy and params.is_plain
    return None if not is_alone or params.has_penalties or params.logit_bias else FAVOURITE


def transformed_laws(
    rows: list[Logits],
    params: SamplingParams,
    state: SamplerState = FRESH,
) -> list[Law]:
    """Return the distributions of several rows, without penalties, as `transformed_law`."""
    cuts = row_cuts(params)
    if cuts is not None and state.grammar is None:
        return [*map(RowLaws(cuts).law, rows)]
    return [transformed_law(row, params, (), state) for row in rows]


def greedy_token(
    logits: Logits,
    params: SamplingParams,
    window: Sequence[int] = (),
    state: SamplerState = FRESH,
) -> int:
    """Return the only token of the distribution at temperature 0, without making that."""
    if state.grammar is not None:
        logits, window = _under_grammar(state.grammar, logits, params, window)
    if not params.is_plain:
        return _law_of_chain(logits, params, window, state).most_likely[0]
    row = logits
    if window or params.logit_bias:
        logits = _adjusted(logits, params, window)
    # Of equals the lowest id; a NaN, at which argmax stops, is seen below.
    token = int(logits.argmax())
    highest = logits.item(token)
    if not math.isfinite(highest):
        _require_finite(highest, row, params)
    return token


def _under_grammar(
    place: GrammarState, logits: Logits, params: SamplingParams, window: Sequence[int]
) -> tuple[Logits, Sequence[int]]:
    """Return a row without the tokens that may not follow a text, and the window of penalties."""
    return place.masked(logits, window), _last(window, params.window_size)


def lead(logits: Logits, token: int) -> float:
    """Return the probability of the most likely token among it and the next one, at temperature 1.

    How sure a row is, without a softmax.
    """
    # Two maxima are much quicker than a sort or a sum of exponentials.
    others = [float(part.max()) for part in (logits[:token], logits[token + 1 :]) if len(part)]
    ahead = float(logits[token]) - max(others, default=-math.inf)
    return 1.0 / (1.0 + math.exp(-min(700.0, max(-700.0, ahead))))


class JoinedTokens(Sequence[int]):
    """Tokens of a text followed by a draft path, joined where they are looked at."""

    __slots__ = ("_path", "_tokens")

    def __init__(self, tokens: Sequence[int], path: Sequence[int]) -> None:
        self._tokens, self._path = tokens, path

    def __len__(self) -> int:
        return len(self._tokens) + len(self._path)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice) and index.step is None:
            n = len(self._tokens)
            start, stop, _ = index.indices(len(self))
            ends = max(0, start - n), max(0, stop - n)
            return [*self._tokens[start:stop], *self._path[slice(*ends)]]
        return [*self._tokens, *self._path][index]


def penalty_window(
    tokens: Sequence[int], path: Sequence[int], params: SamplingParams
) -> Sequence[int]:
    """Return the tokens that penalties read: the last of `tokens` followed by a draft path.

    Under a grammar that is all of them: its place may be further back than penalties look.
    """
    if not params.has_penalties:
        return []
    if params.grammar is not None:
        return JoinedTokens(tokens, path)
    n = params.window_size
    if n < 0:
        return [*tokens, *path]
    return [*tokens[-n:], *path][-n:]


def log_probability(logits: Logits, token: int) -> float:
    """Return log softmax(logits)[token] of one row, before any transformation, in nats."""
    return log_probabilities(logits, [token])[0]


def log_probabilities(logits: Logits, tokens: Sequence[int]) -> list[float]:
    """Return log softmax(logits)[tokens] of one row, before any transformation, in nats."""
    # The highest becomes 0, so that exp cannot overflow.
    shifted = logits - logits.max()
    values = [float(shifted[token]) for token in tokens]
    np.exp(shifted, out=shifted)
    whole = math.log(float(shifted.sum(dtype=np.float64)))
    return [value - whole for value in values]


def highest_tokens(logits: Logits, count: int) -> list[int]:
    """Return the tokens of the `count` highest logits, best first; of equals the lower ids."""
    count = min(count, len(logits))
    if count < 1:
        return []
    # Sorting a whole vocabulary costs more than the rest of a round.
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    near = np.flatnonzero(logits >= least)
    best: list[int] = near[np.argsort(-logits[near], kind="stable")[:count]].tolist()
    return best


def _require_finite(highest: float, row: Logits, params: SamplingParams) -> None:
    """Raise unless the highest logit is finite; blame the settings if that of `row` is."""
    if math.isfinite(highest):
        return
    own = float(row.max())  # NaN if there is any
    require_finite(own)
    off: dict[str, object] = {
        "logit_bias": {},
        "repeat_penalty": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
    }
    if "dry" in params.chain:
        off["dry_multiplier"] = 0
    if params.grammar is not None:
        off["grammar"] = None
    names = " and ".join(name for name, value in off.items() if getattr(params, name) != value)
    if highest == -math.inf:
        raise OptionError(f"none of {len(row)} tokens is left after {names}: allow at least one")
    numbers = f"{highest} after {names}, and {own:.4g} before"
    raise OptionError(f"the highest logit is {numbers}: give smaller numbers")


def _adjusted(logits: Logits, params: SamplingParams, window: Sequence[int]) -> Logits:
    """Return the logits after bias and penalties, a copy if there are any."""
    if params.logit_bias or (window and params.has_penalties):
        logits = logits.copy()
        _add_bias(logits, params)
        _penalise(logits, params, window)
    return logits


def _add_bias(logits: Logits, params: SamplingParams) -> None:
    for token, bias in params.logit_bias.items():
        # A drafter's vocabulary may be shorter than the target's.
        if token < len(logits):
            logits[token] += bias


def _penalise(logits: Logits, params: SamplingParams, window: Sequence[int]) -> None:
    """Apply repeat, frequency and presence penalties."""
    if not window or not params.has_penalties:
        return
    counts = Counter(token for token in window if token < len(logits))
    if not counts:
        return
    ids = np.fromiter(counts.keys(), np.intp, len(counts))
    times = np.fromiter(counts.values(), np.float32, len(counts))
    added = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
    logits[ids] = penalised(logits[ids], times, *added)


def _ranked(logits: Logits, row: Logits, params: SamplingParams, cuts: Cuts) -> Law:
    """Return the rest of a few ranked entries after top-k, top-p and min-p: see `_truncated`."""
    law = Truncation(cuts).law(logits)
    if law is None:
        _require_finite(float(logits.max()), row, params)
        raise AssertionError("a finite row that is not ranked")
    return law


def _truncated(logits: Logits, ids: IdArray | None, row: Logits, params: SamplingParams) -> Law:
    """Return the rest of `ids` after top-k, top-p and min-p; they hold the top k (None: of all).

    `row` are the logits before bias and penalties.

    If equal logits straddle a cut, the lower ids stay. Only values are sorted: the kept tokens
    are then found by comparison with the lowest of them, and are in order.
    """
    values = (logits if ids is None else logits[ids]).astype(np.float64)
    ordered = values.copy()
    ordered.sort()
    highest = float(ordered[-1])  # also where a sort puts NaN
    _require_finite(highest, row, params)
    values -= highest
    ordered -= highest
    n_kept = min(params.top_k or len(ordered), len(ordered))
    if params.top_p < 1.0:
        # Masses of the top k, the highest first: top-p is a share of their sum, and the token that
        # reaches it stays.
        cumulative = np.exp(ordered[: -n_kept - 1 : -1]).cumsum()
        n_kept = bisect_left(cumulative, params.top_p * float(cumulative[-1])) + 1
    # p(x) >= min_p max p, in logarithms with the highest at 0.
    if params.min_p > 0.0:
        n_kept = min(n_kept, len(ordered) - bisect_left(ordered, math.log(params.min_p)))
    kept = (values >= ordered[-n_kept]).nonzero()[0]
    if len(kept) > n_kept:
        kept = _without_last_ties(kept, values[kept], n_kept)
    return _tempered(values[kept], params.temperature, kept if ids is None else ids[kept])


def _without_last_ties(kept: IdArray, values: FloatArray, count: int) -> IdArray:
    """Return `count` of these places: all but the last of those that share the lowest value."""
    tied = (values == values.min()).nonzero()[0]
    return np.delete(kept, tied[count - len(kept) :])


def _untruncated(logits: Logits, row: Logits, params: SamplingParams) -> Law:
    """Return the distribution of all tokens that min-p leaves."""
    values = logits.astype(np.float64)
    highest = float(values.max())
    _require_finite(highest, row, params)
    values -= highest
    if params.min_p <= 0.0:
        return _tempered(values, params.temperature, None)
    ids = np.flatnonzero(values >= math.log(params.min_p))
    return _tempered(values[ids], params.temperature, ids)


def _tempered(values: FloatArray, temperature: float, ids: IdArray | None) -> Law:
    """Return softmax(values / temperature) on `ids`; the highest value is 0."""
    values /= max(temperature, COLDEST)
    np.exp(values, out=values)
    scale_to_one(values)
    return Law(values, ids)


# -- the chain of samplers -------------------------------------------------------------------------


def _law_of_chain(
    logits: Logits, params: SamplingParams, window: Sequence[int], state: SamplerState
) -> Law:
    """Return the distribution that the samplers of `params.chain`, in turn, make of a row."""
    row = logits
    if params.logit_bias:
        logits = logits.copy()
        _add_bias(logits, params)
    _require_finite(float(logits.max()), row, params)
    candidates = steps.allowed(logits, _in_reach_of_top_k(logits, params, window))
    ids, probs = _Chain(row, params, window, state).law(candidates, 0)
    return Law(probs, ids)


def _in_reach_of_top_k(
    logits: Logits, params: SamplingParams, window: Sequence[int]
) -> IdArray | None:
    """Return ids that hold all that top-k may keep; None stands for all ids.

    The samplers before it may raise or lower the tokens of the window, and no others.
    """
    chain = params.chain
    if "top_k" not in chain or not {*chain[: chain.index("top_k")]} <= {"penalties", "dry"}:
        return None
    moved = np.unique(np.array([token for token in window if token < len(logits)], np.intp))
    few = not_below_highest(logits, params.top_k + len(moved))
    return few if few is None or not len(moved) else np.union1d(few, moved)


@dataclass(frozen=True, slots=True)
class _Chain:
    """The samplers of `params.chain`, and their inputs beside the candidates."""

    row: Logits
    params: SamplingParams
    window: Sequence[int]
    state: SamplerState

    def law(self, candidates: Candidates, start: int) -> tuple[IdArray, FloatArray]:
        """Return the ids and probabilities that the samplers from number `start` on leave."""
        params = self.params
        for number, name in enumerate(params.chain[start:], start + 1):
            if name != "xtc":
                candidates = self._after(name, candidates)
                continue
            cut = steps.without_top_choices(candidates, params.xtc_threshold)
            if cut is not None and params.xtc_probability < 1.0:
                # A number is drawn for every token: the distribution is that of both outcomes.
                uncut = self.law(candidates, number)
                return _mixture(params.xtc_probability, self.law(cut, number), uncut)
            candidates = candidates if cut is None else cut
        return candidates.ids, candidates.probabilities()

    def _after(self, name: str, candidates: Candidates) -> Candidates:
        params = self.params
        match name:
            case "penalties" | "dry":
                return self._penalised(name, candidates)
            case "top_n_sigma":
                return steps.keep_above_sigma(candidates, params.top_n_sigma)
            case "top_k":
                return steps.keep_top_k(candidates, params.top_k)
            case "typ_p":
                return steps.keep_typical(candidates, params.typical_p)
            case "top_p":
                return steps.keep_top_p(candidates, params.top_p)
            case "min_p":
                return steps.keep_min_p(candidates, params.min_p)
            case "mirostat":
                return self._steered(candidates)
        # Mirostat has no dynamic temperature.
        if params.dynatemp_range > 0.0 and not params.mirostat:
            spread, exponent = params.dynatemp_range, params.dynatemp_exp
            return steps.tempered_by_entropy(candidates, params.temperature, spread, exponent)
        return steps.tempered(candidates, params.temperature)

    def _penalised(self, name: str, candidates: Candidates) -> Candidates:
        params, window = self.params, self.window
        if name == "penalties":
            added = params.repeat_penalty, params.frequency_penalty, params.presence_penalty
            last = _last(window, params.repeat_last_n)
            candidates = steps.penalise_tokens(candidates, last, *added)
        else:
            amounts = repetition_penalties(
                _last(window, params.dry_penalty_last_n),
                self.state.breakers,
                multiplier=params.dry_multiplier,
                base=params.dry_base,
                allowed=params.dry_allowed_length,
            )
            candidates = steps.lowered(candidates, amounts)
        _require_finite(float(candidates.values.max()), self.row, params)
        return candidates

    def _steered(self, candidates: Candidates) -> Candidates:
        mu = starting_mu(self.params, self.state)
        if self.params.mirostat == 1:
            return keep_zipf(candidates, mu, len(self.row))
        return keep_unsurprising(candidates, mu)


def starting_mu(params: SamplingParams, state: SamplerState) -> float:
    """Return mirostat's mu, which is twice the target surprise at first."""
    return 2.0 * params.mirostat_ent if state.mu is None else state.mu


def _last(tokens: Sequence[int], count: int) -> Sequence[int]:
    """Return the last `count` tokens; all for -1."""
    return tokens[max(0, len(tokens) - count) if count >= 0 else 0 :]


def _mixture(
    share: float, first: tuple[IdArray, FloatArray], second: tuple[IdArray, FloatArray]
) -> tuple[IdArray, FloatArray]:
    """Return share * first + (1 - share) * second; each is ids and probabilities."""
    ids = np.union1d(first[0], second[0])
    probs = np.zeros(len(ids))
    probs[ids.searchsorted(first[0])] += share * first[1]
    probs[ids.searchsorted(second[0])] += (1.0 - share) * second[1]
    return ids, probs
