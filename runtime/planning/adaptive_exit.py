"""Draft & Verify's adaptive exit: a confidence threshold learnt from acceptance.

Zhang et al., "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative
Decoding" (2023), section 3.4: a draft ends if the drafter is less sure than a threshold; after
each round the threshold moves so that the share of accepted tokens tends to a target. Constants are
those of the authors' program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.planning.draft_plan import Plan
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import DraftTree

_GREEDY_START, _SAMPLED_START = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class AdaptiveExitOptions:
    """The rule's constants: `acceptance` (alpha), `step` (epsilon) and `beta1`, `beta2`.

    `start` is the first threshold; None means 0.8 at temperature 0 and 0.5 above.
    """

    start: float | None = None
    acceptance: float = 0.9
    step: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9

    def __post_init__(self) -> None:
        for name in ("start", "acceptance", "step", "beta1", "beta2"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value <= 1.0:
                raise OptionError(f"p_min=adaptive: {name} is {value}: it must be between 0 and 1")


class AdaptiveExit(Plan):
    """The plan of Draft & Verify: a threshold of one answer ends chains.

    It depends on finished rounds alone, so that drafts stay exact. The authors look at the drawn
    token's own probability and keep the token; here the greatest probability of the distribution is
    read before anything is drawn from it. The first token of a round is always drafted, as theirs
    is: a round without a draft would teach nothing, and a threshold that is too high would stay.
    """

    is_threshold = True

    def __init__(self, options: AdaptiveExitOptions | None = None) -> None:
        self._options = options or AdaptiveExitOptions()
        self._threshold: float | None = None
        self._acceptance = 0.0
        self._drafted: Sequence[int] = ()
        self._is_first = self._stopped = False

    def begin(self, *, alike: bool = False) -> None:
        """Forget everything: each answer starts alike, so that a seed repeats its text."""
        self._threshold = None
        self._acceptance = 0.0
        self._drafted = ()

    def start(self, *, points: bool, greedy: bool = False) -> None:
        """Start a round."""
        self.threshold(greedy=greedy)
        self._is_first, self._stopped = True, False

    def takes(self, certainty: float) -> bool:
        """Return whether the drafter is sure enough to draft a token."""
        assert self._threshold is not None
        first, self._is_first = self._is_first, False
        self._stopped = not first and certainty < self._threshold
        return not self._stopped

    def drafted(self, tree: DraftTree) -> DraftTree:
        """Note a chain; return it."""
        self._drafted = tree.tokens
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """End the round."""
        start, drafted = outcome.start, self._drafted
        # In an ensemble the path may be another drafter's.
        accepted = common_prefix(drafted, outcome.tokens[start : start + len(outcome.path)])
        # A draft that its end token or its limit ended was as long as it could be.
        self.learn(len(drafted), accepted, most=len(drafted) + self._stopped)
        self._drafted = ()

    def threshold(self, *, greedy: bool) -> float:
        """Return how certain the drafter must be to draft on."""
        if self._threshold is None:
            usual = _GREEDY_START if greedy else _SAMPLED_START
            start = self._options.start
            self._threshold = usual if start is None else start
        return self._threshold

    def learn(self, drafted: int, accepted: int, *, most: int) -> None:
        """Move the threshold after a round that drafted so many tokens of at most `most`.

        AR <- b1 AR + (1 - b1) accepted / drafted; then the threshold moves by a share 1 - b2 of
        epsilon: up if AR is below alpha, else down, unless the draft was as long as it may be.
        """
        # Rounds without a draft show nothing of acceptance.
        if drafted < 1 or self._threshold is None:
            return
        options, beta1 = self._options, self._options.beta1
        # Section 3.4's smoothed rate; its beta1 weighs the past.
        self._acceptance = beta1 * self._acceptance + (1 - beta1) * accepted / drafted
        if self._acceptance < options.acceptance:
            wanted = self._threshold + options.step
        # A draft that ran to its limit did not stop by the
        # threshold: lowering it would change nothing.
        elif drafted < most:
            wanted = self._threshold - options.step
        else:
            return
        moved = options.beta2 * self._threshold + (1 - options.beta2) * wanted
        self._threshold = min(1.0, max(0.0, moved))
