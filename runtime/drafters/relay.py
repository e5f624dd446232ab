"""One drafter after the other: CS-Drafting's horizontal cascade (Chen et al. 2023, section 3.2).

The first tokens of a draft are accepted most often, so they are worth the better drafter; those behind them, which
count only if all before them are accepted, get a cheaper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.grafting import first_path, graft
from specrun.runtime.drafters.member_noise import MemberNoise
from specrun.runtime.drafters.member_outcome import outcome_for, outcome_for_idle
from specrun.runtime.drafters.members import all_layer_inputs, close_all, learn_prompts, part_reports
from specrun.runtime.prefix import common_prefix
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree

__all__ = ["RelayDrafter"]


class RelayDrafter(Drafter):
    """Each member goes on where the one before it stopped, for at most `counts[i]` tokens (None: its own number).

    A member that proposes nothing is skipped. Below a tree, the next member goes on from one leaf only, that of the
    path of first draws: the drafter's favourite. Members get the guesses before them as if they were committed,
    and take back what was rejected (`Drafter.rewind`). Owns them.
    """

    def __init__(self, members: Sequence[Drafter], counts: Sequence[int | None], *, name: str = "relay") -> None:
        if len(members) < 2:
            raise OptionError(f"{name}: a relay needs at least two drafters, as in relay(draft(a.gguf)@2, ...)")
        self.name = name
        self.needs_hidden_states = any(member.needs_hidden_states for member in members)
        self.layer_inputs = all_layer_inputs(members)
        self.max_nodes = sum(member.max_nodes for member in members)
        # The leaf that a member goes on from is a leaf no longer.
        self.max_leaves = sum(member.max_leaves for member in members) - len(members) + 1
        self._members = list(members)
        self._counts = list(counts)
        self._trees: list[DraftTree] = []
        self._places: list[dict[int, int]] = []

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
        self._trees, self._places = [], []
        for member in self._members:
            member.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on to those who read the target's states."""
        learn_prompts(self._members, start, rows, count)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the members' trees, one below the other."""
        self._trees, self._places = [], []
        tree, tip = DraftTree(), ROOT
        tokens: Sequence[int] = request.tokens
        for index, (member, count) in enumerate(zip(self._members, self._counts, strict=True)):
            depth = 0 if tip == ROOT else tree.depths[tip]
            own = member.propose(
                DraftRequest(
                    tokens,
                    request.params,
                    MemberNoise(request.noise, index),
                    min(request.max_depth - depth, count or request.max_depth),
                    request.max_nodes - len(tree),
                )
            )
            path = first_path(own)
            tree, places = graft(tree, tip, own)
            self._trees.append(own)
            self._places.append(places)
            if path:
                tip = places[path[-1]]
                tokens = [*tokens, *(own.tokens[node] for node in path)]
        return tree

    def observe(self, outcome: RoundOutcome) -> None:
        """Take rejected guesses back from each member, and tell it what became of its own tree."""
        start = len(outcome.tokens) - len(outcome.path) - (outcome.next_token is not None)
        for index, member in enumerate(self._members):
            if index >= len(self._trees):
                member.observe(outcome_for_idle(outcome))
                continue
            own, places = self._trees[index], self._places[index]
            guessed = outcome.tree.path_to(places[ROOT])
            agreed = common_prefix(guessed, outcome.path)
            if agreed == len(guessed):
                member.observe(outcome_for(outcome, own, places))
            else:
                member.rewind(start + agreed)
                member.observe(outcome_for_idle(outcome))
        self._trees, self._places = [], []

    def rewind(self, length: int) -> None:
        """Pass on."""
        for member in self._members:
            member.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return the reports of the members that have something to say."""
        return part_reports(self._members)

    def close(self) -> None:
        """Close all members, whatever one of them raises."""
        close_all(self._members)
