"""What a run did and how long it took: counts per round, acceptance by position, time by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RoundCounter", "SpecStats"]


@dataclass(frozen=True, slots=True)
class SpecStats:
    """Statistics of one answer; times in seconds, rates in tokens per second, None where nothing was counted.

    `drafted` counts candidate nodes, `accepted` the kept ones, `mean_accepted_length` is tokens per target
    evaluation, with the target's own token; `acceptance_by_position[i]` is the share of rounds that drafted
    at depth i + 1 and kept a token there. `acceptance_given_prefix[i]` is the share of the `tested_by_position[i]`
    rounds that kept i drafted tokens and had drafts below them that kept one more: for chains EAGLE's n-alpha.
    `overhead_s` is wall time outside native evaluation.
    `tokens_per_second` leaves out the time until the first token's round began (the prompt). `drafting` is what
    the drafter itself reports: the choices of `auto`, the inner rounds of `cascade`, the parts of combinators.
    `non_candidates` are nodes that were evaluated beside the drafted ones and could not be kept (lookahead's window).
    """

    drafter: str
    rule: str
    exact: bool
    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    acceptance_by_position: tuple[float, ...]
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    time_to_first_token_s: float | None
    target_s: float
    drafter_s: float
    overhead_s: float
    wall_s: float
    drafting: Mapping[str, Any] = field(default_factory=dict)
    non_candidates: int = 0
    acceptance_given_prefix: tuple[float, ...] = ()
    tested_by_position: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as a mapping, ready for JSON."""
        return dataclasses.asdict(self)


class RoundCounter:
    """Adds up rounds."""

    def __init__(self) -> None:
        self.rounds = 0
        self.tokens = 0
        self.drafted = 0
        self.accepted = 0
        self.non_candidates = 0
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._tested_at: list[int] = []

    def count(
        self,
        n_candidates: int,
        depth: int,
        n_accepted: int,
        n_tokens: int,
        n_others: int = 0,
        n_tested: int | None = None,
    ) -> None:
        """Count a round that drafted `n_candidates` nodes down to `depth` and produced `n_tokens`.

        `n_others` are the nodes that were evaluated but could not be accepted. `n_tested` is at how many depths there
        were drafts to accept below what was kept: those that were, and one more where all were rejected; as for a
        chain where it is left out.
        """
        self.rounds += 1
        self.tokens += n_tokens
        self.drafted += n_candidates
        self.accepted += n_accepted
        self.non_candidates += n_others
        while len(self._drafted_at) < depth:
            self._drafted_at.append(0)
            self._accepted_at.append(0)
            self._tested_at.append(0)
        for position in range(min(depth, n_accepted + 1) if n_tested is None else n_tested):
            self._tested_at[position] += 1
        for position in range(depth):
            self._drafted_at[position] += 1
            self._accepted_at[position] += position < n_accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per target evaluation, with the target's own."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> Sequence[float]:
        """The share of rounds that kept a token at each depth they drafted."""
        return tuple(a / d for a, d in zip(self._accepted_at, self._drafted_at, strict=True))

    @property
    def acceptance_given_prefix(self) -> Sequence[float]:
        """The share of the tests at each depth that kept a token there, down to the last depth that was tested."""
        pairs = zip(self._accepted_at, self.tested_by_position, strict=False)
        return tuple(accepted / tested for accepted, tested in pairs)

    @property
    def tested_by_position(self) -> Sequence[int]:
        """In how many rounds drafts were tested at each depth: all depths above had kept a token."""
        return tuple(tested for tested in self._tested_at if tested)
