"""Prompt lookup: continue the last words as they continued before (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest
from specrun.runtime.prefix import common_prefix
from specrun.runtime.tree import DraftTree

__all__ = ["PromptLookupDrafter"]


class PromptLookupDrafter(Drafter):
    """Finds the latest earlier place where the last tokens stood, and drafts what followed there.

    The longest suffix of up to `max_ngram` and at least `min_ngram` tokens decides. The drafts are point
    masses, so the text is plain decoding's own at every temperature. The index of n-grams grows with the
    committed tokens: a round costs the same at any context length.
    """

    def __init__(
        self,
        *,
        num_draft_tokens: int = 5,
        max_ngram: int = 4,
        min_ngram: int = 2,
        name: str = "prompt-lookup",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(f"n is {num_draft_tokens}: prompt lookup must draft at least 1 token (or use none)")
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(f"n-gram sizes from {min_ngram} to {max_ngram}: give 1 <= min_ngram <= max_ngram")
        self.name = name
        self.max_nodes = num_draft_tokens
        self._sizes = range(min_ngram, max_ngram + 1)
        self._indexed: list[int] = []
        # n-gram -> the position after its latest and after its previous occurrence
        self._after: dict[tuple[int, ...], tuple[int, int]] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        """Index the prompt; what it shares with the last one stays indexed."""
        if common_prefix(self._indexed, tokens) < len(self._indexed):
            self._indexed.clear()
            self._after.clear()
        self._index(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the continuation of the longest suffix seen before, as a chain of point masses."""
        self._index(request.tokens)
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        start = self._continuation() if count > 0 else None
        if start is None:
            return DraftTree()
        return DraftTree.chain(self._indexed[start : start + count])

    def _continuation(self) -> int | None:
        """Return the position that follows the latest earlier occurrence of the longest known suffix."""
        end = len(self._indexed)
        for size in reversed(self._sizes):
            if size >= end:
                continue
            latest, previous = self._after.get(tuple(self._indexed[end - size :]), (0, 0))
            start = latest if latest < end else previous
            if start > 0:
                return start
        return None

    def _index(self, tokens: Sequence[int]) -> None:
        for position in range(len(self._indexed), len(tokens)):
            for size in self._sizes:
                if size <= position + 1:
                    gram = tuple(tokens[position + 1 - size : position + 1])
                    latest, _ = self._after.get(gram, (0, 0))
                    self._after[gram] = (position + 1, latest)
            self._indexed.append(tokens[position])  # last, so that Ctrl-C above only means doing it again
