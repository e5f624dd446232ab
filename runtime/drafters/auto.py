"""The drafter with the best measured speed, chosen while decoding.

The choice of a round depends on the tokens and the times of earlier rounds only, so the text keeps the target's
distribution whatever is chosen. Times are measured, so another run may choose otherwise: every choice is logged,
and a log can be replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.choice_log import ChoiceLog
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.member_outcome import outcome_for_idle
from specrun.runtime.drafters.members import MembersDrafter
from specrun.runtime.planning.arm_choice import ArmChooser
from specrun.runtime.prefix import common_prefix
from specrun.runtime.tree import DraftTree

__all__ = ["AutoDrafter", "Clock"]

_FAST = 1.5  # a promised speed-up that is worth to begin with

Clock = Callable[[], float]
"""Returns seconds from any fixed moment on."""


class AutoDrafter(MembersDrafter):
    """Asks one of its members each round, the one that `ArmChooser` picks. Owns them; one of them should be `none`.

    A round's time runs from the request for a draft to the end of `observe`: drafting, verification and what
    drafters learn, not what the consumer of a stream does between rounds. All members learn of every round, and one
    that slept catches up with the text when it is asked again, which is part of its time. `sizes` say how complicated
    members are: of equally fast ones the simplest is asked.
    """

    def __init__(
        self,
        members: Sequence[Drafter],
        *,
        replay: Sequence[ChoiceLog] = (),
        clock: Clock = time.perf_counter,
        sizes: Sequence[int] = (),
        name: str = "auto",
    ) -> None:
        if len(members) < 2:
            raise OptionError(f"{name}: there is nothing to choose from; name at least one drafter beside none")
        super().__init__(members, name=name)
        self.max_leaves = max(member.max_leaves for member in members)
        self.max_nodes = max(member.max_nodes for member in members)
        self._names = [member.name for member in members]
        for log in replay:
            log.choices_for(self._names)  # a log of other drafters is refused at once
        self._sizes = tuple(sizes)
        self._chooser = self._new_chooser()
        self._clock = clock
        self._replay = list(replay)
        self._replayed: list[int] = []
        self._log = ChoiceLog(self._names)
        self._known: list[int] = []
        self._chosen: int | None = None
        self._started = 0.0

    @property
    def n_params(self) -> int:
        """The parameters of the largest member: only one of them runs at a time."""
        return max(member.n_params for member in self._members)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: what was measured before is kept, and seen again sooner; no tokens forget it."""
        super().begin(tokens)
        if not tokens:
            self._chooser = self._new_chooser()
        self._chooser.begin(len(tokens) - common_prefix(self._known, tokens))
        self._known = list(tokens)
        self._log = ChoiceLog(self._names)
        self._chosen = None
        if self._replay:
            self._replayed = self._replay.pop(0).choices_for(self._names)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the proposal of the member that is likely fastest."""
        self._started = self._clock()
        n_rounds = self._log.n_rounds
        if n_rounds < len(self._replayed):
            self._chosen = self._replayed[n_rounds]
        else:
            if self._chooser.is_new:
                self._start(request)
            self._chosen = self._chooser.choose()
        return self._members[self._chosen].propose(request)

    def observe(self, outcome: RoundOutcome) -> None:
        """Tell the member that was asked what became of its tree, the others what the text is now."""
        for index, member in enumerate(self._members):
            member.observe(outcome if index == self._chosen else outcome_for_idle(outcome))
        self._known += outcome.tokens[len(self._known) :]
        if self._chosen is None:
            return
        seconds = self._clock() - self._started
        self._chooser.record(self._chosen, outcome.n_new, seconds, len(outcome.tree) > 0)
        self._log.add(self._chosen, outcome.n_new, seconds)
        self._chosen = None

    def _start(self, request: DraftRequest) -> None:
        """Begin with the first member, unless another one sees already that it will be fast."""
        promised = [member.forecast(request) for member in self._members]
        best = promised.index(max(promised))
        self._chooser.start_with(best if promised[best] >= _FAST else 0)

    def _new_chooser(self) -> ArmChooser:
        plain = self._names.index("none") if "none" in self._names else 0
        return ArmChooser(len(self._names), plain, sizes=self._sizes)

    def rewind(self, length: int) -> None:
        """Pass on."""
        del self._known[length:]
        super().rewind(length)

    def report(self) -> dict[str, Any]:
        """Return who was asked how often and how fast it was, and all choices in order, as a log to replay."""
        return {**self._log.to_dict(), **super().report()}
