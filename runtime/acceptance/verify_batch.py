"""Verification of many chains at once over plain arrays, in the manner of vLLM's rejection sampler.

One row of the batch is one sequence with its own chain of drafted tokens and its own noise. Token
by token it is Leviathan et al. (2023, algorithm 1) and Chen et al. (2023, algorithm 2): accept x
with probability min(1, P(x) / Q(x)), after a rejection draw from norm(max(0, P - Q)), after full
acceptance from the target's law behind the last token.

Unlike vLLM, the residual is not clamped to a smallest positive value (which would draw tokens of
zero mass), and the bonus token is drawn here, from the last row of `target_probs`, not by the
caller. Every decision and every call of the noise source is the engine's own `ExactRule`'s: the
same source gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.law import Law
from specrun.runtime.noise import NoiseSource

PADDING = -1
"""What fills a row of the output after its last token."""

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
    noise: Sequence[NoiseSource | np.random.Generator],
    *,
    num_draft_tokens: TokenIds | None = None,
    positions: TokenIds | None = None,
    strict: bool = False,
) -> OutputIds:
    """Return each sequence's accepted tokens, one more, then PADDING: int64 [batch, k + 1].

    `target_probs` [batch, k + 1, vocab] are the target's transformed laws: row i decides drafted
    token i, the row behind the last drafted token the bonus token. `draft_probs` [batch, k, vocab]
    are the laws the tokens `draft_token_ids` [batch, k] were drawn from; None means that they are
    point masses. `noise` holds one source per sequence. `num_draft_tokens` [batch] says how many of
    the k tokens a sequence really drafted (what follows them is not read), `positions` [batch]
    where its first new token will stand (0 if left out): it keys noise sources that have a key.

    `strict` checks shapes, types, ranges and that the laws sum to one, which costs more than the
    verification.
    """
    if strict:
        _check(target_probs, draft_probs, draft_token_ids, noise, num_draft_tokens, positions)
    batch, k = draft_token_ids.shape
    output = np.full((batch, k + 1), PADDING, np.int64)
    for row in range(batch):
        n_drafted = k if num_draft_tokens is None else int(num_draft_tokens[row])
        tokens = _verify_row(
            target_probs[row],
            None if draft_probs is None else draft_probs[row],
            draft_token_ids[row, :n_drafted].tolist(),
            _as_source(noise[row]),
            0 if positions is None else int(positions[row]),
        )
        output[row, : len(tokens)] = tokens
    return output


def _as_source(noise: NoiseSource | np.random.Generator) -> NoiseSource:
    return GeneratorNoise(noise) if isinstance(noise, np.random.Generator) else noise


def _verify_row(
    target_probs: Probs,
    draft_probs: Probs | None,
    drafted: list[int],
    noise: NoiseSource,
    position: int,
) -> list[int]:
    """Return the accepted tokens of one sequence and the token after them."""
    output: list[int] = []
    for index, token in enumerate(drafted):
        noise.seek(position + index)
        if draft_probs is None:
            # One draw tells whether the point mass is accepted and, if not, what comes instead.
            output.append(noise.choose(_law(target_probs[index])))
            if output[-1] != token:
                return output
            continue
        target_prob = float(target_probs[index, token])
        draft_prob = float(draft_probs[index, token])
        if draft_prob <= 0.0:
            raise OptionError(f"token {token} was drafted from a law that gives it probability 0")
        # Without target mass no number is asked for, as in `decide`: the same calls, the same text.
        if not (target_prob > 0.0 and noise.accept(target_prob / draft_prob)):
            residual = _law(target_probs[index]).residual(_law(draft_probs[index]))
            return [*output, noise.choose(residual)]
        output.append(token)
    noise.seek(position + len(drafted))
    return [*output, noise.choose(_law(target_probs[len(drafted)]))]


def _law(probs: Probs) -> Law:
    # In float64, because residuals subtract nearly equal numbers.
    return Law(np.ascontiguousarray(probs, np.float64))


def _check(
    target_probs: Probs,
    draft_probs: Probs | None,
    draft_token_ids: TokenIds,
    noise: Sequence[NoiseSource | np.random.Generator],
    num_draft_tokens: TokenIds | None,
    positions: TokenIds | None,
) -> None:
    """Raise `OptionError` for the first argument that is not what `verify_batch` says."""
    # Types, then shapes, then values: each check reads only what those before it made sure of.
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
    # [batch, k]: what follows a row's draft is not read, so it may hold anything.
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
    """Raise unless every law that will be read is finite, not negative, and sums to one."""
    lowest = probs.min(axis=2, initial=0.0)
    totals = probs.sum(axis=2, dtype=np.float64)
    # NaN fails both comparisons, so they are asked the way that lets it through to the error.
    wrong = is_read & ~((lowest >= 0.0) & (np.abs(totals - 1.0) <= _TOLERANCE))
    if wrong.any():
        row, index = (int(place) for place in np.argwhere(wrong)[0])
        total = f"sums to {totals[row, index]:.6g}"
        problem = total if lowest[row, index] >= 0.0 else "has a negative or NaN entry"
        place = f"{name}[{row}, {index}]"
        raise OptionError(f"{place} {problem}: it must be a law (not negative, sum 1)")


def _check_support(
    draft_probs: Probs, token_ids: TokenIds, is_drafted: npt.NDArray[np.bool_]
) -> None:
    """Raise if a token was drafted from a law that excludes it."""
    # What is not read may be no token id, such as PADDING: 0 is a safe index in its place.
    ids = np.where(is_drafted, token_ids, 0)
    chosen = np.take_along_axis(draft_probs, ids[:, :, None], axis=2)[:, :, 0]
    wrong = is_drafted & ~(chosen > 0.0)
    if wrong.any():
        row, index = (int(place) for place in np.argwhere(wrong)[0])
        token = f"draft_token_ids[{row}, {index}] is {int(token_ids[row, index])}"
        problem = "to which draft_probs gives probability 0: it cannot be drawn from that law"
        raise OptionError(f"{token}, {problem}")
