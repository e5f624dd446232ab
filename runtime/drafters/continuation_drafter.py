"""What prompt lookup and REST share: retrieve continuations, draft the best of them, learn which matches hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.continuation_tree import (
    Continuation,
    TreeLimits,
    continuation_tree,
    promised_speed_up,
    teach,
)
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.match_trust import MatchTrust
from specrun.runtime.drafters.topology import MAX_NODES, check_leaves
from specrun.runtime.planning.cost_curves import CostCurve
from specrun.runtime.planning.stored_curves import TYPICAL_CPU
from specrun.runtime.tree import DraftTree

__all__ = ["ContinuationDrafter"]


class ContinuationDrafter(Drafter):
    """Drafts what followed earlier occurrences of the last tokens, wherever a subclass finds them.

    `depth` is the longest path, `nodes` the largest tree, `branches` the most leaves. Drafts are point masses,
    so the text is plain decoding's own at every temperature. How much is drafted follows the length of the
    match, the acceptance so far and `costs`, the price of evaluating n tokens; often it is nothing.
    """

    def __init__(
        self, *, depth: int, nodes: int | None, branches: int, name: str, costs: CostCurve = TYPICAL_CPU
    ) -> None:
        kind = name.partition("(")[0]
        if depth < 1:
            raise OptionError(f"{kind}: n is {depth}: draft at least 1 token (or use none)")
        nodes = depth if nodes is None else nodes
        if not 1 <= nodes <= MAX_NODES:
            raise OptionError(f"{kind}: a tree of {nodes} nodes: give 1 to {MAX_NODES}")
        if branches < 1:
            raise OptionError(f"{kind}: branches is {branches}: give at least 1")
        check_leaves(f"{kind}: branches is {branches}", branches)
        self.name = name
        self.max_nodes = nodes
        self.max_leaves = min(branches, nodes)
        self._depth = depth
        self._costs = costs
        self._trust = MatchTrust()
        self._retrieved: Sequence[Continuation] = ()
        self._retrieved_at = -1

    @abstractmethod
    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        """Return what followed earlier occurrences of the last of `tokens`, up to `length` tokens each."""

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the tree of continuations that pays, empty where none does."""
        self._retrieved = self.retrieve(request.tokens, self._depth)
        self._retrieved_at = len(request.tokens)
        if not self._retrieved:
            return DraftTree()
        return continuation_tree(self._retrieved, self._trust, self._limits(request), self._costs)

    def forecast(self, request: DraftRequest) -> float:
        """Return what the continuations found now promise."""
        found = self.retrieve(request.tokens, self._depth)
        return promised_speed_up(found, self._trust, self._limits(request), self._costs) if found else 1.0

    def observe(self, outcome: RoundOutcome) -> None:
        """Learn how the retrieved continuations fared, those that were not drafted too."""
        if self._retrieved:
            teach(self._trust, self._retrieved, outcome.tokens[self._retrieved_at :])
            self._retrieved = ()

    def rewind(self, length: int) -> None:
        """Teach nothing about guesses that were taken back."""
        if self._retrieved_at > length:
            self._retrieved = ()

    def _limits(self, request: DraftRequest) -> TreeLimits:
        return TreeLimits(
            min(self.max_nodes, request.max_nodes),
            min(self._depth, request.max_depth),
            self.max_leaves,
            request.end_tokens,
        )

    def start_over(self) -> None:
        """Forget what earlier texts taught about matches."""
        self._trust.forget()
        self._retrieved = ()
