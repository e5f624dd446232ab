"""Medusa's heads for several conversations: their hidden states are rows of one evaluation.

What the heads say depends on a state alone, so any number of states have the same shape. Where one
conversation drafts alone, nothing is waited for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import SpecrunError
from specrun.runtime.drafters.medusa.medusa_head import MOST_STATES, HeadsSaid, MedusaHead
from specrun.runtime.drafters.meeting import DraftMeeting

State = npt.NDArray[np.float32]


class AskedState:
    """A hidden state [1, hidden] that a conversation asks about, and what came of it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.seconds = 0.0
        self._said: HeadsSaid | SpecrunError | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the heads were asked."""
        return self._said is not None

    def answer(self, said: HeadsSaid | SpecrunError, seconds: float) -> None:
        """Take what they said, which took so much of an evaluation's time."""
        self._said, self.seconds = said, seconds

    @property
    def said(self) -> HeadsSaid:
        """What they said; raises what their evaluation did."""
        if isinstance(self._said, SpecrunError):
            raise self._said
        assert self._said is not None
        return self._said


class HeadsTogether:
    """The heads at a meeting of conversations, and the states that they are asked about."""

    def __init__(self, heads: MedusaHead, meeting: DraftMeeting) -> None:
        self._heads, self._meeting = heads, meeting
        self.asking: list[AskedState] = []
        meeting.join(self)

    @property
    def waits(self) -> bool:
        """Whether others draft at the same time, whom it is worth to wait for."""
        return self._meeting.n_drafting > 1

    def ask(self, state: State) -> AskedState:
        """Ask about a state in the next evaluation."""
        asked = AskedState(state)
        self.asking.append(asked)
        return asked

    def withdraw(self, asked: AskedState) -> None:
        """Ask for nothing any more: the answer has ended."""
        if asked in self.asking:
            self.asking.remove(asked)

    def evaluate(self) -> float:
        """Ask the heads about the states that came first; return the seconds."""
        taken, self.asking = self.asking[:MOST_STATES], self.asking[MOST_STATES:]
        before = self._heads.native_seconds
        try:
            said = self._heads.said_of(np.concatenate([asked.state for asked in taken]))
        except SpecrunError as problem:
            for asked in taken:
                asked.answer(problem, 0.0)
            return 0.0
        seconds = self._heads.native_seconds - before
        for asked, own in zip(taken, said, strict=True):
            asked.answer(own, seconds / len(taken))
        return seconds

    def close(self) -> None:
        """Leave the meeting; again does nothing."""
        self._meeting.leave(self)
