"""Arms of the bandit behind `auto`: what is forecast of a drafter's rounds, and measured."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field

from specrun.runtime.costs import STALL, TYPICAL_CPU, CostCurve, lower_median

# The weight of a round of an arm after its next one: estimates look back about 50 rounds.
_MEMORY = 0.98
# An arm in use has changed that lost more plain rounds than this and did not win them back: of one
# that gains .6 a round as luck will have it, once in 40,000 rounds. Rounds kept for it.
_CHANGED, _LAST = 10.0, 32
# What is believed of an arm's rounds before they were seen: their spread, and its weight.
_PRIOR_ROUNDS, _PRIOR_SPREAD, _PLAIN_SPREAD, _PRIOR_TOKENS = 2.0, 0.5, 0.1, 2.0


@dataclass(frozen=True, slots=True)
class ArmForecast:
    """What is known of an arm before its first round.

    `parts` say how complicated it is: of equally fast arms the least is used. It drafts at most
    `most` tokens, each for `draft` times what one token costs the target, which verifies at the
    costs of `curve`.
    """

    parts: int = 1
    most: int = 5
    draft: float = 0.0
    curve: CostCurve = TYPICAL_CPU

    def extra(self, nodes: int) -> float:
        """Return what drafting and verifying so many nodes takes, in plain rounds beyond one."""
        nodes = min(nodes, self.most)
        return self.curve.seconds(1 + nodes) / self.curve.seconds(1) - 1.0 + nodes * self.draft

    @property
    def target_reading(self) -> float:
        """What the target takes to read a token of a prompt, in plain rounds."""
        batch = self.curve.sizes[-1]
        return self.curve.seconds(batch) / self.curve.seconds(1) / batch

    def deepest(self, stake: float) -> int:
        """Return 1, 2, 4, ...: the longest draft of at most this extra, 0 if that is any draft."""
        if self.extra(self.most) <= stake:
            return 0
        depth = 1
        while 2 * depth < self.most and self.extra(2 * depth) <= stake:
            depth *= 2
        return depth

    @property
    def margin(self) -> float:
        """How many times its extra the best draft is worth if all of it is accepted."""
        return max(depth / max(self.extra(depth), 1e-9) for depth in self._depths)

    def ceiling(self, scale: float) -> float:
        """Return the tokens of a plain round's time if all that is drafted were accepted.

        What drafting takes beyond a plain round is `scale` times what is forecast.
        """
        return max((1.0 + depth) / (1.0 + scale * self.extra(depth)) for depth in self._depths)

    @property
    def _depths(self) -> set[int]:
        """Lengths of drafts: 1, 2, 4, ..., and the longest."""
        return {min(1 << power, self.most) for power in range(self.most.bit_length() + 1)}


@dataclass(slots=True)
class Arm:
    """What is known of one arm. Sums fade with `_MEMORY`, totals do not."""

    rounds: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0  # of tokens - rate * seconds, round by round
    last_seen: int = 0
    behind: int = 0  # tokens of the text that it has not seen yet, and must catch up with
    catch_up: float | None = None  # the least seconds that each such token took
    patience: float = 1.0
    depth: int = 0  # the longest draft it may make, 0: as long as it likes
    scale: float | None = None  # the least that drafting took, in forecasts
    last: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_LAST))
    slump: float = 0.0  # what they lost, in plain rounds
    recent: list[deque[float]] = field(default_factory=lambda: [deque(maxlen=9) for _ in range(2)])

    @property
    def rate(self) -> float:
        """Tokens per second, 0 if never seen."""
        return self.tokens / self.seconds if self.seconds > 0.0 else 0.0

    @property
    def mean_seconds(self) -> float:
        """Seconds a round."""
        return self.seconds / self.rounds if self.rounds else 0.0

    @property
    def mean_tokens(self) -> float:
        """Tokens a round, 1 if never seen."""
        return self.tokens / self.rounds if self.rounds else 1.0

    def usual(self, drafted: bool) -> float | None:
        """Return the seconds of a usual round that drafted, or of one that did not."""
        # Plain rounds and drafting ones of one arm differ in time, so each kind has a median.
        recent = self.recent[drafted]
        return lower_median(recent) if recent else None

    def add(self, tokens: int, seconds: float, drafted: bool) -> None:
        """Count a round, its time cut where something else disturbed it."""
        self.recent[drafted].append(seconds)
        seconds = min(seconds, STALL * (self.usual(drafted) or seconds))
        self.last.append((tokens, seconds))
        self._sum(tokens, seconds)

    def _sum(self, tokens: int, seconds: float) -> None:
        self.fade(_MEMORY)
        self.rounds += 1.0
        self.tokens += tokens
        self.seconds += seconds
        # Residuals of a ratio estimate: the standard error of the rate comes from them.
        self.squares += (tokens - self.rate * seconds) ** 2

    def fade(self, share: float) -> None:
        """Forget all but this share of the evidence; the rate stays."""
        self.rounds *= share
        self.tokens *= share
        self.seconds *= share
        self.squares *= share

    def notices_change(self, plain: float) -> bool:
        """Believe the last rounds alone if they lost much against plain rounds of such seconds.

        The cumulative sum (Page 1954) of what rounds lose begins again where all was won back.
        """
        tokens, seconds = self.last[-1]
        self.slump = max(0.0, self.slump + seconds / plain - tokens)
        if self.slump > _CHANGED:
            self.fade(0.0)
            for tokens, seconds in self.last:
                self._sum(tokens, seconds)
        elif self.slump > 0.0:
            return False
        changed, self.slump = self.slump > 0.0, 0.0
        self.last.clear()
        return changed

    def for_another_text(self) -> Arm:
        """Return a copy of what does not depend on the text."""
        recent = [deque(times, maxlen=times.maxlen) for times in self.recent]
        last: deque[tuple[int, float]] = deque(maxlen=_LAST)
        return dataclasses.replace(
            self, last_seen=0, behind=0, patience=1.0, last=last, recent=recent
        )

    def limit(self, depth: int) -> None:
        """Let it draft so many tokens at most; what longer or shorter drafts took counts less."""
        if depth != self.depth:
            self.depth = depth
            self.recent[True].clear()
            self.fade(0.5)

    @property
    def error(self) -> float:
        """The standard error of the rate."""
        spread = _PRIOR_SPREAD if self.recent[True] or self.scale else _PLAIN_SPREAD
        # The prior stands in for spread that was not seen yet: two equal rounds prove little.
        prior = _PRIOR_ROUNDS * (spread * max(self.mean_tokens, _PRIOR_TOKENS)) ** 2
        variance = (self.squares + prior) / (self.rounds + _PRIOR_ROUNDS) / self.rounds
        return math.sqrt(variance) / self.mean_seconds
