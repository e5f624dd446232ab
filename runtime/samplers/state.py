"""Sampler state of an answer, beside its tokens: DRY's breakers, mirostat's mu, a grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specrun.runtime.grammar.state import GrammarState


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What the laws of an answer depend on beside rows, settings and tokens.

    `breakers` are those of `dry.Breakers`. `mu` is mirostat's, in bits, after the tokens that were
    accepted; None at the beginning of an answer. `grammar` is the place after those tokens, or an
    earlier one; None where any text may be said.
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
