"""One way to decode, as its rounds were measured: tokens per second, and how sure that is."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

__all__ = ["Arm"]

_MEMORY = 0.99
"""Weight of a round of an arm after its next one: estimates look back about 100 rounds."""

_PRIOR_ROUNDS, _PRIOR_SPREAD, _PLAIN_SPREAD, _PRIOR_TOKENS = 2.0, 0.5, 0.1, 2.0
"""What is believed of an arm's rounds before they were seen: their relative spread, and for how much it counts."""

_STALL = 2.0
"""Rounds that take this many times their arm's median were disturbed from outside, and count as this many."""


@dataclass(slots=True)
class Arm:
    """What is known of one arm. Sums fade with `_MEMORY`, totals do not."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of tokens - rate * seconds, round by round
    last_seen: int = 0
    behind: int = 0  # tokens of the text that it has not seen yet, and must catch up with
    catch_up: float | None = None  # seconds for each such token, once measured
    patience: float = 1.0
    ever_drafted: bool = False
    recent: tuple[deque[float], deque[float]] = field(default_factory=lambda: (deque(maxlen=9), deque(maxlen=9)))

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if never seen."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_seconds(self) -> float:
        """Seconds a round."""
        return self.seconds / self.rounds if self.rounds else 0.0

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Count a round, its time cut where something else disturbed it."""
        recent = self.recent[drafted]
        recent.append(seconds)
        usual = sorted(recent)[(len(recent) - 1) // 2]
        seconds = min(seconds, _STALL * usual)
        self.rounds = self.rounds * _MEMORY + 1.0
        self.tokens = self.tokens * _MEMORY + tokens
        self.seconds = self.seconds * _MEMORY + seconds
        self.squares = self.squares * _MEMORY + (tokens - self.rate * seconds) ** 2
        self.ever_drafted = self.ever_drafted or drafted

    @property
    def error(self) -> float:
        """The standard error of the rate."""
        mean = self.tokens / self.rounds
        spread = _PRIOR_SPREAD if self.ever_drafted else _PLAIN_SPREAD
        prior = _PRIOR_ROUNDS * (spread * max(mean, _PRIOR_TOKENS)) ** 2
        variance = (self.squares + prior) / (self.rounds + _PRIOR_ROUNDS) / self.rounds
        return math.sqrt(variance) / self.mean_seconds
