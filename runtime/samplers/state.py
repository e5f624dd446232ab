"""Sampler state of an answer, beside its tokens: DRY's breakers as tokens, mirostat's mu."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What the laws of an answer depend on beside rows, settings and tokens.

    `breakers` are those of `dry.Breakers`. `mu` is mirostat's, in bits, after the tokens that were
    accepted; None at the beginning of an answer.
    """

    breakers: Mapping[int, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    mu: float | None = None

    def with_mu(self, mu: float) -> SamplerState:
        """Return the state with another mu."""
        return dataclasses.replace(self, mu=mu)


FRESH = SamplerState()
"""The state at the beginning of an answer, without sequence breakers."""
