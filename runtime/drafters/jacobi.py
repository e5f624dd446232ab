"""Jacobi decoding: guess m tokens, and let the target correct all of them at once (Santilli et al. 2023).

"Accelerating Transformer Inference for Translation via Parallel Decoding", algorithm 1: greedy decoding is the system
y_i = argmax p(. | y_1..y_{i-1}, x) for i = 1..m. The iteration evaluates every equation with the last iterate on its
right side; it reaches the fixed point, greedy decoding's own text, after at most m steps, because step k has the first
k tokens right, and sooner where guesses were right by luck.

Here an iterate is a chain of point masses. Verification keeps its correct beginning and adds the target's own token,
which is the fixed-point test; the greedy tokens after the rest are the next iterate, and new guesses fill it up to m
behind. So at temperature 0 it is the paper's iteration, on a window that slides with the text; with sampling the
iterates stay drafts, which verification accepts where the draw agrees, and the text is plain decoding's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.tree import DraftTree

__all__ = ["JacobiDrafter"]


class JacobiDrafter(Drafter):
    """Drafts the target's own last guesses for the next `n` positions; the first ones are drawn from the text."""

    def __init__(self, *, n: int = 4, seed: int = 0, name: str = "jacobi") -> None:
        if n < 1:
            raise OptionError(f"n is {n}: Jacobi decoding must iterate on at least 1 token (or use none)")
        self.name = name
        self.max_nodes = n
        self._seed = seed
        self._random = random.Random(seed)
        self._iterate: list[int] = []
        self._tree: DraftTree | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Start from new guesses."""
        self._random = random.Random(self._seed)
        self._iterate.clear()
        self._tree = None

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the iterate as a chain."""
        while len(self._iterate) < self.max_nodes:
            self._iterate.append(self._random.choice(request.tokens))
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        self._tree = DraftTree.chain(self._iterate[: max(count, 0)])
        return self._tree

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the target's greedy tokens after the rejected guesses as the next iterate."""
        tree, self._tree = self._tree, None
        self._iterate.clear()
        kept = len(outcome.path)
        if tree is None or not outcome.tree.extends(tree) or outcome.path != tuple(range(kept)) or kept > len(tree):
            return  # a combinator verified something else
        # Row 0 is the root's and row i + 1 that of guess i: after `kept` guesses row `kept` gave the target's own
        # token, and the rows behind it say what follows.
        self._iterate += (int(outcome.rows.logits(row).argmax()) for row in range(kept + 1, len(tree) + 1))
