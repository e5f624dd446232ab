"""Prompt lookup: continue the last words as they continued before (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        # n-gram -> the positions after its occurrences, in order
        self._after: dict[tuple[int, ...], list[int]] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        """Index the prompt; what it shares with the last one stays indexed."""
        self.rewind(common_prefix(self._indexed, tokens))
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
            after = self._after.get(tuple(self._indexed[end - size :]), [])
            for start in after[:-3:-1]:  # the last one may be the suffix itself
                if start < end:
                    return start
        return None

    def rewind(self, length: int) -> None:
        """Take the tokens from position `length` on out of the index."""
        while (end := len(self._indexed)) > length:
            for gram in self._grams_before(end, self._indexed):
                after = self._after.get(gram, [])
                if after and after[-1] >= end:
                    after.pop()
            self._indexed.pop()

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(len(self._indexed) + 1, len(tokens) + 1):
            for gram in self._grams_before(end, tokens):
                after = self._after.setdefault(gram, [])
                if not after or after[-1] < end:
                    after.append(end)
            self._indexed.append(tokens[end - 1])  # last, so that Ctrl-C above only means doing it again

    def _grams_before(self, end: int, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the n-grams that end before a position."""
        for size in self._sizes:
            if size <= end:
                yield tuple(tokens[end - size : end])
