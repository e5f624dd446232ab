"""REST (He et al. 2023): the last tokens go on as they did in a corpus, found in a suffix array."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import TYPICAL_CPU, CostCurve
from specrun.runtime.drafters.retrieval.continuation import Continuation, ContinuationDrafter
from specrun.runtime.drafters.retrieval.datastore import DEPTH, ContextIndex
from specrun.runtime.text import common_prefix

_MOST_PLACES = 4096


class RestDrafter(ContinuationDrafter):
    """Retrieves the `places` of a datastore with the longest matches, and merges what followed.

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
        """Keep what earlier answers taught as long as the conversation goes on."""
        # Another text than the last one: evidence of a conversation is its own.
        if common_prefix(self._prompt, tokens) < len(self._prompt):
            self.start_over()
        self._prompt = list(tokens)

    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        """Return what followed the places whose last tokens match longest."""
        found = self._store.nearest(tokens[-DEPTH:], self._places, length, self._min_match)
        # Equal continuations are one with more weight: a trie need not hold a thousand copies.
        alike = Counter((match, tuple(known)) for match, known in found)
        return [Continuation(known, match, count) for (match, known), count in alike.items()]
