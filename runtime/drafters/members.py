"""What all drafters that are made of drafters have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specrun.runtime.drafters.drafter import Drafter, DrafterWeights, close_all, make_all
from specrun.runtime.target import EvaluatedRows

__all__ = ["MembersDrafter", "combined"]


class MembersDrafter(Drafter):
    """Owns its members, drafters of the same conversation.

    It reads of the target what they read, and passes on what concerns all of them.

    A subclass says how many leaves and nodes its trees have, proposes, and tells members what became of it.
    """

    def __init__(self, members: Sequence[Drafter], *, name: str) -> None:
        self.name = name
        self.needs_hidden_states = any(member.needs_hidden_states for member in members)
        self.layer_inputs = tuple(sorted({layer for member in members for layer in member.layer_inputs}))
        self.needs_nextn_states = any(member.needs_nextn_states for member in members)
        self._members = list(members)

    @property
    def native_seconds(self) -> float:
        """Time inside all members' evaluations."""
        return sum(member.native_seconds for member in self._members)

    @property
    def n_params(self) -> int:
        """All members' parameters."""
        return sum(member.n_params for member in self._members)

    def begin(self, tokens: Sequence[int]) -> None:
        """Pass on."""
        for member in self._members:
            member.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Show the target's states over a prompt to the members that read them."""
        for member in self._members:
            if member.reads_target:
                member.learn_prompt(start, rows, count)

    def rewind(self, length: int) -> None:
        """Pass on."""
        for member in self._members:
            member.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return the reports of the members that have something to say, as {"parts": [{"drafter": name, ...}]}."""
        parts = [{"drafter": one.name, **report} for one in self._members if (report := one.report())]
        return {"parts": parts} if parts else {}

    def close(self) -> None:
        """Close all members, whatever one of them raises."""
        close_all(self._members)


def combined(
    name: str, members: Sequence[DrafterWeights], combine: Callable[[Sequence[Drafter]], Drafter]
) -> DrafterWeights:
    """Return the weights of a combinator, which own those of its members.

    Starting it starts every member, and `combine` makes one drafter of them, which owns them; if anything fails, what
    was started is closed again.
    """

    def start() -> Drafter:
        started = make_all(member.start for member in members)
        try:
            return combine(started)
        except BaseException:
            close_all(started)
            raise

    return DrafterWeights(name, start, members)
