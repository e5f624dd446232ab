"""Targets of float32 rows, and counts of what compiled loops were called for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.runtime.acceptance import exact
from specrun.runtime.laws import Law, SamplingParams
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import DraftTree
from specrun.runtime.trees.tree import Draw
from support.enumeration import Propose, emitted_law, largest_error
from support.plain_laws import plain_law
from support.scripted import LawTable, TableRows

CUT = SamplingParams(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)
"""Three of the tokens, whichever these are after each prefix."""

DEFAULT = SamplingParams()


class RowTable(LawTable):
    """A fixed random row of logits for every prefix; its law is what `params` make of it.

    Few tokens may be said, other ones in other rows: the rest is at -inf, as are some of these.
    """

    def __init__(
        self, seed: int, params: SamplingParams = CUT, most: int = 4, zeros: float = 0.2
    ) -> None:
        super().__init__(params.top_k + 3, seed, zeros)
        self.params, self._most = params, most
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

    def row(self, prefix: Sequence[int]) -> np.ndarray:
        """The row after a prefix, float32."""
        key = tuple(prefix)
        if key not in self._rows:
            generator = np.random.default_rng([self._seed, len(key), *key])
            row = np.full(self.size, -np.inf, np.float32)
            # The same tokens for all seeds: drafts are to meet their target.
            row[: self._most] = 1.5 * generator.standard_normal(self._most)
            row[1 : self._most][generator.random(self._most - 1) < self._zeros] = -np.inf
            self._rows[key] = row
        return self._rows[key]

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        key = tuple(prefix)
        if key not in self._known:
            law = plain_law(self.row(key), self.params, [])
            self._known[key] = law.aligned_to(Law(np.zeros(self.size)))
        return self._known[key]

    def rows(self, prefixes: Sequence[Sequence[int]]) -> TableRows:
        return _Rows([*map(self.row, prefixes)])


class _Rows(TableRows):
    def logits(self, row: int) -> np.ndarray:
        return self._laws[row]


def row_bias(
    rule: exact.ExactRule | exact.BlockRule, propose: Propose | None, table: RowTable, length: int
) -> float:
    """Return the largest error of any text's probability, under the table's own settings."""
    emitted = emitted_law(rule, propose, table, length, frozenset(), table.params)
    return largest_error(emitted, table, length)


def on_supports(propose: Propose | None) -> Propose | None:
    """Propose the same, each law on its support."""

    def sparse(draw: Draw) -> Draw:
        if draw.law is None or draw.law.ids is not None:
            return draw
        ids = np.flatnonzero(draw.law.probs)
        return Draw(draw.node, Law(draw.law.probs[ids], ids))

    def proposed(request: DraftRequest) -> DraftTree:
        assert propose is not None
        tree = propose(request)
        if all(draw.law is None or draw.law.ids is not None for draw in every_draw(tree)):
            return tree  # as it is: siblings stay together
        draws = {parent: tuple(map(sparse, drawn)) for parent, drawn in tree.draws.items()}
        return DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)

    return None if propose is None else proposed


def every_draw(tree: DraftTree) -> list[Draw]:
    """All draws of a tree."""
    return [draw for drawn in tree.draws.values() for draw in drawn]
