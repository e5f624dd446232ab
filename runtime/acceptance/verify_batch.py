"""A reference for arrays of chains, in the manner of vLLM's rejection sampler, for tests.

The runtime does not use it: an engine verifies slot by slot, from rows of logits of which it reads
no more than it needs. It is here for callers that have such arrays, and as a second implementation
of chains that must agree with the first: one row of a batch is one sequence with its own chain of
drafted tokens and its own noise. Token by token it is Leviathan et al. (2023, algorithm 1) and Chen
et al. (2023, algorithm 2): accept x with probability min(1, P(x) / Q(x)), after a rejection draw
from norm(max(0, P - Q)), after full acceptance from the target's distribution behind the last
token.

Unlike vLLM, the residual is not clamped to a smallest positive value (which would draw tokens of
zero mass), and the bonus token is drawn here, from the last row of `target_probs`, unless the
caller gives it. Every decision and every call of the noise source is `ExactRule`'s: the same source
gives the same tokens, also those of the compiled walk.

Measured with 2, 4 and 8 chains of 5 tokens, vocabulary 32,000, one core of a busy machine, least of
15 repetitions: from whole distributions that are there, 250, 618 and 1,068 us here, 234, 597 and
1,080 us slot by slot (the residual takes most of it; both compute it once a chain); from rows of
logits with top-k 40, the distributions of all places as arrays included, 503, 1,439 and 3,115 us
here, 97, 246 and 472 us slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource, SeededNoise

PADDING = -1
"""The filling of a row of the output after its last token."""

Probs = npt.NDArray[np.floating]
TokenIds = npt.NDArray[np.integer]
OutputIds = npt.NDArray[np.int64]

_TOLERANCE = 1e-4  # a float32 softmax over a vocabulary of 256k tokens sums to one within 1e-6


class GeneratorNoise:
    """A noise source over a numpy generator, kept per sequence (vLLM's seeded requests).

    Its numbers depend on the order of the calls, not on positions.
    """

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def seek(self, position: int) -> None:
        """Do nothing: a generator goes on from where it is."""

    def accept(self, probability: float) -> bool:
        """Return True with the given probability."""
        return probability >= 1.0 or float(self._generator.random()) < probability

    def choose(self, law: Law) -> int:
        """Return a token drawn from `law`."""
        return law.token_at(float(self._generator.random()))

    def for_drafting(self, round_start: int) -> GeneratorNoise:
        """Return an independent source."""
        return GeneratorNoise(self._generator.spawn(1)[0])


def verify_batch(
    target_probs: Probs,
    draft_probs: Probs | None,
    draft_token_ids: TokenIds,
    noise: Sequence[NoiseSource | np.random.Generator | int],
    *,
    num_draft_tokens: TokenIds | None = None,
    positions: TokenIds | None = None,
    bonus_token_ids: TokenIds | None = None,
    disable_bonus: bool = False,
    strict: bool = False,
) -> OutputIds:
    """Return each sequence's accepted tokens, one more, then PADDING: int64 [batch, k + 1].

    `target_probs` [batch, k + 1, vocab] are the target's transformed distributions: row i decides
    drafted token i, the row behind the last drafted token the bonus token. `draft_probs` [batch, k,
    vocab] are the distributions the tokens `draft_token_ids` [batch, k] were drawn from; None means
    that they are point masses. `noise` holds one source, or a seed, per sequence.
    `num_draft_tokens` [batch] holds the number of the k tokens that a sequence really drafted (the
    others are not read), `positions` [batch] where its first new token will stand (0 if left out):
    it keys noise sources that have a key. After a draft that was kept whole stands the token of
    `bonus_token_ids` [batch], if these are given (they must have been drawn from the target's
    distribution there), or none with `disable_bonus`; then the row behind the last drafted token is
    not read.

    `strict` checks shapes, types, ranges and that the distributions sum to one, which costs more
    than the verification.
    """
    if strict:
        _check(target_probs, draft_probs, draft_token_ids, noise, num_draft_tokens, positions)
    batch, k = draft_token_ids.shape
    output = np.full((batch, k + 1), PADDING, np.int64)
    lengths = [k] * batch if num_draft_tokens is None else num_draft_tokens.tolist()
    starts = [0] * batch if positions is None else positions.tolist()
    ids = _readable(draft_token_ids, lengths)
    target_of, draft_of = _of_tokens(target_probs, ids), _of_tokens(draft_probs, ids)
    drafted = ids.tolist()
    for row in range(batch):
        n, source = lengths[row], _as_source(noise[row])
        laws = None if draft_probs is None else draft_probs[row]
        chances = (target_of[row], draft_of[row]) if target_of and draft_of else None
        tokens, kept = _walk(
            target_probs[row], laws, drafted[row][:n], chances, source, starts[row]
        )
        if kept and bonus_token_ids is not None and not disable_bonus:
            tokens.append(int(bonus_token_ids[row]))
        elif kept and not disable_bonus:
            source.seek(starts[row] + n)
            tokens.append(source.choose(_law(target_probs[row][n])))
        output[row, : len(tokens)] = tokens
    return output


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """The results of drafts: vLLM's counters. `possible`: the most that could be emitted."""

    drafted: int
    accepted: int
    emitted: int
    possible: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def system_efficiency(self) -> float | None:
        """Emitted tokens over those of drafts that are all kept, each with a bonus token."""
        return self.emitted / self.possible if self.possible else None

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
            self.possible + other.possible,
        )


def count_batch(
    output: OutputIds, draft_token_ids: TokenIds, num_draft_tokens: TokenIds | None = None
) -> BatchCounts:
    """Return the counters of `verify_batch`'s results for these drafts."""
    batch, k = draft_token_ids.shape
    lengths = np.full(batch, k) if num_draft_tokens is None else num_draft_tokens
    is_drafted = np.arange(k) < lengths[:, None]
    # A rejected token is replaced by another one: its residual has none of it.
    kept = np.cumprod((output[:, :k] == draft_token_ids) & is_drafted, axis=1)
    n_drafted = int(lengths.sum())
    emitted = int(np.count_nonzero(output != PADDING))
    return BatchCounts(n_drafted, int(kept.sum()), emitted, n_drafted + batch)


def _readable(draft_token_ids: TokenIds, lengths: Sequence[int]) -> TokenIds:
    """Return the ids with 0 in place of unread ones, which may be no tokens."""
    k = draft_token_ids.shape[1]
    return np.where(np.arange(k) < np.asarray(lengths).reshape(-1, 1), draft_token_ids, 0)


def _of_tokens(probs: Probs | None, ids: TokenIds) -> list[list[float]] | None:
    """Return the probabilities of all drafted tokens, [batch, k], in one go."""
    if probs is None:
        return None
    k = ids.shape[1]
    found: list[list[float]] = np.take_along_axis(probs[:, :k], ids[:, :, None], 2)[
        :, :, 0
    ].tolist()
    return found


def _as_source(noise: NoiseSource | np.random.Generator | int) -> NoiseSource:
    if isinstance(noise, int):
        return SeededNoise(noise)
    return GeneratorNoise(noise) if isinstance(noise, np.random.Generator) else noise


def _walk(
    target_probs: Probs,
    draft_probs: Probs | None,
    drafted: list[int],
    chances: tuple[list[float], list[float]] | None,
    noise: NoiseSource,
    position: int,
) -> tuple[list[int], bool]:
    """Return the tokens of one sequence up to a rejection, and whether there was none.

    `chances` are the target's and the draft's probabilities of the drafted tokens.
    """
    output: list[int] = []
    for index, token in enumerate(drafted):
        noise.seek(position + index)
        if draft_probs is None or chances is None:
            # One draw decides whether the point mass is accepted and, if not, the token instead.
            output.append(noise.choose(_law(target_probs[index])))
            if output[-1] != token:
                return output, False
            continue
        target_prob, draft_prob = chances[0][index], chances[1][index]
        if draft_prob <= 0.0:
            raise OptionError(f"token {token} was drafted from a distribution that lacks it")
        # Without target mass no number is drawn, as in `decide`: the same calls, the same text.
        if not (target_prob > 0.0 and noise.accept(target_prob / draft_prob)):
            residual = _law(target_probs[index]).residual(_law(draft_probs[index]))
            return [*output, noise.choose(residual)], False
        output.append(token)
    return output, True


def _law(probs: Probs) -> Law:
    # In float64, because residuals subtract nearly equal numbers.
    return Law(np.ascontiguousarray(probs, np.float64))


def _check(
    target_probs: Probs,
    draft_probs: Probs | None,
    draft_token_ids: TokenIds,
    noise: Sequence[NoiseSource | np.random.Generator | int],
    num_draft_tokens: TokenIds | None,
    positions: TokenIds | None,
) -> None:
    """Raise `OptionError` for the first argument that `verify_batch` does not allow."""
    # Types, then shapes, then values: each check reads only values that those before it made sure
    # of.
    _check_type("draft_token_ids", draft_token_ids, "iu", 2)
    _check_type("target_probs", target_probs, "f", 3)
    batch, k = draft_token_ids.shape
    vocab = target_probs.shape[2]
    _check_shape("target_probs", target_probs, (batch, k + 1, vocab))
    if draft_probs is not None:
        _check_type("draft_probs", draft_probs, "f", 3)
        _check_shape("draft_probs", draft_probs, (batch, k, vocab))
    if len(noise) != batch:
        problem = f"noise holds {len(noise)} sources for {batch} sequences"
        raise OptionError(f"{problem}: give one for each")
    by_sequence = (("num_draft_tokens", num_draft_tokens, k), ("positions", positions, None))
    for name, counts, highest in by_sequence:
        if counts is not None:
            _check_type(name, counts, "iu", 1)
            _check_shape(name, counts, (batch,))
            _check_range(name, counts, highest)
    lengths = np.full(batch, k) if num_draft_tokens is None else num_draft_tokens
    # [batch, k]: numbers after a row's draft are not read, so they may be anything.
    is_drafted = np.arange(k) < lengths[:, None]
    _check_range("draft_token_ids", np.where(is_drafted, draft_token_ids, 0), vocab - 1)
    # One row more than there are drafted tokens: the bonus token's.
    _check_laws("target_probs", target_probs, np.arange(k + 1) <= lengths[:, None])
    if draft_probs is not None:
        _check_laws("draft_probs", draft_probs, is_drafted)
        _check_support(draft_probs, draft_token_ids, is_drafted)


def _check_type(name: str, values: npt.NDArray[np.generic], kinds: str, n_dims: int) -> None:
    """Raise unless `values` is an array of one of the dtype kinds, such as "f" or "iu"."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
        found = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
        wanted = "floating" if kinds == "f" else "integer"
        raise OptionError(f"{name} is {found}: it must be a numpy array of {wanted} type")
    if values.ndim != n_dims:
        raise OptionError(f"{name} has shape {values.shape}: it must have {n_dims} dimensions")


def _check_shape(name: str, values: npt.NDArray[np.generic], wanted: tuple[int, ...]) -> None:
    if values.shape != wanted:
        rule = f"with these draft_token_ids it must be {wanted}"
        raise OptionError(f"{name} has shape {values.shape}: {rule}")


def _check_range(name: str, values: TokenIds, highest: int | None) -> None:
    wrong = (values < 0) if highest is None else (values < 0) | (values > highest)
    if wrong.any():
        where = tuple(int(place) for place in np.argwhere(wrong)[0])
        limit = "at least 0" if highest is None else f"between 0 and {highest}"
        raise OptionError(f"{name}{list(where)} is {int(values[where])}: it must be {limit}")


def _check_laws(name: str, probs: Probs, is_read: npt.NDArray[np.bool_]) -> None:
    """Raise unless every distribution to be read is finite, not negative, and sums to one."""
    lowest = probs.min(axis=2, initial=0.0)
    totals = probs.sum(axis=2, dtype=np.float64)
    # NaN fails both comparisons, so they are written such that NaN leads to the error.
    wrong = is_read & ~((lowest >= 0.0) & (np.abs(totals - 1.0) <= _TOLERANCE))
    if wrong.any():
        row, index = (int(place) for place in np.argwhere(wrong)[0])
        total = f"sums to {totals[row, index]:.6g}"
        problem = total if lowest[row, index] >= 0.0 else "has a negative or NaN entry"
        place = f"{name}[{row}, {index}]"
        raise OptionError(f"{place} {problem}: it must be a distribution (not negative, sum 1)")


def _check_support(
    draft_probs: Probs, token_ids: TokenIds, is_drafted: npt.NDArray[np.bool_]
) -> None:
    """Raise if a token was drafted from a distribution that excludes it."""
    # Unread numbers may be no token ids, such as PADDING: 0 is a safe index in its place.
    ids = np.where(is_drafted, token_ids, 0)
    chosen = np.take_along_axis(draft_probs, ids[:, :, None], axis=2)[:, :, 0]
    wrong = is_drafted & ~(chosen > 0.0)
    if wrong.any():
        row, index = (int(place) for place in np.argwhere(wrong)[0])
        token = f"draft_token_ids[{row}, {index}] is {int(token_ids[row, index])}"
        problem = "to which draft_probs gives probability 0: it cannot be drawn from these"
        raise OptionError(f"{token}, {problem}")
