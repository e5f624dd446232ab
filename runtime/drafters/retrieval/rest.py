"""REST (He et al. 2023): the continuations of a datastore's best matches."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.retrieval.continuation import (
    Continuation,
    ContinuationDrafter,
    counted,
)
from specrun.runtime.drafters.retrieval.datastore import (
    DEPTH,
    ContextIndex,
    open_store,
)
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import TYPICAL_CPU, CostCurve
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.round.text import common_prefix

_MOST_PLACES = 4096


class RestDrafter(ContinuationDrafter):
    """Retrieves the `places` of a datastore with the longest matches, and merges the continuations.

    Suffixes of `min_match` to 16 tokens count. A round costs a binary search in a mapped file and
    does not depend on the length of the context.
    """

    def __init__(
        self,
        store: ContextIndex,
        *,
        num_draft_tokens: int = 10,
        nodes: int | None = None,
        branches: int = 2,
        places: int = 32,
        min_match: int = 2,
        name: str = "rest",
        costs: CostCurve = TYPICAL_CPU,
    ) -> None:
        depth = num_draft_tokens
        super().__init__(depth=depth, nodes=nodes, branches=branches, name=name, costs=costs)
        if not 1 <= places <= _MOST_PLACES:
            raise OptionError(f"rest: places is {places}: give 1 to {_MOST_PLACES}")
        if not 1 <= min_match <= DEPTH:
            raise OptionError(
                f"rest: min_match is {min_match}: give 1 to {DEPTH}, the longest suffix looked up"
            )
        self._store = store
        self._prompt: list[int] = []
        self._places, self._min_match = places, min_match

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the counts of earlier answers as long as the conversation goes on."""
        super().begin(tokens)
        # Another text than the last one: evidence of a conversation is its own.
        if self.begins_alike or common_prefix(self._prompt, tokens) < len(self._prompt):
            self.start_over()
        self._prompt = list(tokens)

    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        """Return the continuations of the places whose last tokens match longest."""
        found = self._store.nearest(tokens[-DEPTH:], self._places, length, self._min_match)
        return counted(found)  # a trie need not hold a thousand copies


def build_rest(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `rest(STORE, n=auto, nodes=10, branches=2, places=32, min_match=2, always=no)`."""
    options = options_of(expression)
    store = open_store(file_of(expression, env), env.target.vocabulary)
    n = options.length("n")
    make = functools.partial(
        RestDrafter,
        store,
        num_draft_tokens=env.bounded(10) if n is None else n,
        nodes=options.optional_integer("nodes"),
        branches=options.integer("branches", 2 if env.target.can_branch else 1),
        places=options.integer("places", 32),
        min_match=options.integer("min_match", 2),
        costs=env.curve,
        name=str(expression),
    )
    n_batch = env.context.n_batch
    return DrafterWeights(str(expression), lambda: make().fitting(n_batch), pace="paying")
