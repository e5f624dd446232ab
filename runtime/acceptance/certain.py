"""Acceptance at temperature 0, where each of the target's laws is sure of a token.

Every exact rule then keeps the nodes that spell what the target would have said. Over point masses
nothing but the highest entry of each row on the way has to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrun.runtime.acceptance.rule import Acceptance
from specrun.runtime.compiled import LOOPS
from specrun.runtime.law import Law
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits, greedy_token
from specrun.runtime.tree import DraftTree


@dataclass(slots=True)
class CertainLaws:
    """The laws of rows at temperature 0, each sure of its highest logit, to ask or to follow.

    `logits(0)` is the row of the root, `logits(i + 1)` that of node i.
    """

    logits: Callable[[int], Logits]
    params: SamplingParams

    def __call__(self, node: int) -> Law:
        """Return the law after a node."""
        return Law.point(greedy_token(self.logits(node + 1), self.params))

    def followed(self, tree: DraftTree) -> Acceptance | None:
        """Return what an exact rule keeps of point masses; None where it has to be asked.

        That is where a child was drawn from a law, where a row is broken, and where there is no
        compiled code: the rules' own walk gives the same.
        """
        if LOOPS is None:
            return None
        kept = LOOPS.walk_highest(self.logits, tree.tokens, tree.draws.get)
        return None if kept is None else Acceptance(*kept)
