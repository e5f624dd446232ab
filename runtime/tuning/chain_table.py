"""Theory of chains: tokens a round, speed-up, operations and bytes of 1, 2, 3, ... drafts.

All are over plain decoding, from alpha (the chance that a drafted token is accepted), c (a drafted
token's time over a plain one's), c-hat (its operations over the target's) and, where they are
known, the measured T(n) and the bytes that evaluations read. The formulas are those of
`runtime/costs/theory.py` and `memory_traffic.py`, which name their papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import CostCurve, expected_tokens
from specrun.runtime.costs.memory_traffic import MemoryTraffic, bytes_per_token, bytes_ratio
from specrun.runtime.costs.theory import (
    measured_improvement,
    operation_ratio,
    wall_clock_improvement,
)

LONGEST = 64
"""The longest chain that is looked at."""


@dataclass(frozen=True, slots=True)
class ChainInputs:
    """alpha, c and c-hat; T(n) as a curve, and what target and drafter read, where known.

    `n_context` tokens are cached in both. Raises `OptionError` for numbers that make no sense.
    """

    acceptance: float
    cost_ratio: float
    operation_cost_ratio: float
    curve: CostCurve | None = None
    traffic: tuple[MemoryTraffic, MemoryTraffic] | None = None
    n_context: float = 0.0

    def __post_init__(self) -> None:
        wall_clock_improvement(self.acceptance, 1, self.cost_ratio)
        operation_ratio(self.acceptance, 1, self.operation_cost_ratio)
        if not self.n_context >= 0.0:
            raise OptionError(f"n_context is {self.n_context}: give 0 or more tokens")


@dataclass(frozen=True, slots=True)
class ChainRow:
    """Chains of `n_draft`: tokens of a round, and over plain decoding the rest.

    `improvement` is of tokens a second where verifying more tokens costs nothing, `measured` with
    the curve; `operations` and `bytes` are those of a token. None: not known.
    """

    n_draft: int
    tokens: float
    improvement: float
    operations: float
    measured: float | None
    bytes: float | None


def chain_row(inputs: ChainInputs, n_draft: int) -> ChainRow:
    """Return what the formulas say of chains of so many drafts; 0 is plain decoding."""
    alpha, curve, measured, read = inputs.acceptance, inputs.curve, None, None
    tokens = expected_tokens(alpha, n_draft)
    if curve is not None:
        drafting = n_draft * inputs.cost_ratio * curve.seconds(1)
        measured = measured_improvement(tokens, n_draft, curve.seconds, drafting)
    if inputs.traffic is not None:
        read = bytes_ratio(*inputs.traffic, alpha, n_draft, n_context=inputs.n_context)
    return ChainRow(
        n_draft,
        tokens,
        wall_clock_improvement(alpha, n_draft, inputs.cost_ratio),
        operation_ratio(alpha, n_draft, inputs.operation_cost_ratio),
        measured,
        read,
    )


@dataclass(frozen=True, slots=True)
class BestLengths:
    """The best chains: `flat` where more tokens cost nothing, by T(n), and by what is read."""

    flat: int
    measured: int | None
    by_bytes: int | None

    @property
    def longest(self) -> int:
        """The longest of them."""
        return max(self.flat, self.measured or 0, self.by_bytes or 0)


def best_lengths(inputs: ChainInputs, most: int = LONGEST) -> BestLengths:
    """Return the lengths of 0 to `most` that gain most, the shortest of equals."""
    rows = [chain_row(inputs, n_draft) for n_draft in range(most + 1)]

    def best(gain: Callable[[ChainRow], float | None]) -> int | None:
        found = [(value, -row.n_draft) for row in rows if (value := gain(row)) is not None]
        return -max(found)[1] if found else None

    flat = best(lambda row: row.improvement)
    assert flat is not None
    return BestLengths(
        flat,
        best(lambda row: row.measured),
        best(lambda row: None if row.bytes is None else -row.bytes),
    )


def tokens_per_second_by_bandwidth(
    inputs: ChainInputs, n_draft: int, bytes_per_second: float
) -> float:
    """Return the tokens a second where memory alone decides: bandwidth over bytes of a token.

    Leviathan et al. (2023), section 3.4: an evaluation reads the weights once for all its tokens.
    """
    if inputs.traffic is None:
        raise OptionError("what evaluations read is not known: give the files of both models")
    if not 0.0 < bytes_per_second < float("inf"):
        raise OptionError(f"a bandwidth of {bytes_per_second:g} bytes a second: give more than 0")
    read = bytes_per_token(*inputs.traffic, inputs.acceptance, n_draft, n_context=inputs.n_context)
    return bytes_per_second / read
