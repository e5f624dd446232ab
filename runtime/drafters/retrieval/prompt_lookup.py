"""Prompt lookup (Saxena 2023; LLMA, Yang et al. 2023): the last tokens go on as they did before."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, Places
from specrun.runtime.drafters.likely_trees import Guess
from specrun.runtime.drafters.retrieval.continuation import (
    Continuation,
    ContinuationDrafter,
    counted,
    likely_nodes,
)
from specrun.runtime.drafters.retrieval.datastore import ContextIndex, read_reference
from specrun.runtime.drafters.retrieval.ngram_index import FOUND_AGAIN, NgramIndex, Realignment
from specrun.runtime.language import Expression, options_of, parse_expression
from specrun.runtime.planning import MOST_DRAFTED, TYPICAL_CPU, CostCurve
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest
from specrun.runtime.round.text import common_prefix

_RECENCY = 0.8  # of two equally long matches, the earlier one counts this much
_FORMULA = 5  # tokens that may be repeated without any other repetition
_FROM_REFERENCE = 4  # places of the reference that are considered
_FROM_ANSWERS = 16  # of the answers that are kept


class PromptLookupDrafter(ContinuationDrafter):
    """Finds the places of the text that the last tokens resemble most, and merges continuations.

    The text is prompt, history, a reference and the answers that are kept. The longest suffix of at
    least `min_ngram` tokens decides: n-grams of up to `max_ngram` tokens are indexed, matches are
    compared up to twice that. Among places with equally long matches later ones count more. A round
    costs the same at any context length.
    """

    def __init__(
        self,
        *,
        num_draft_tokens: int = 15,
        nodes: int | None = None,
        branches: int = 4,
        max_ngram: int = 16,
        min_ngram: int = 2,
        reference: ContextIndex | None = None,
        answers: Places | None = None,
        name: str = "prompt-lookup",
        costs: CostCurve = TYPICAL_CPU,
    ) -> None:
        depth = num_draft_tokens
        super().__init__(depth=depth, nodes=nodes, branches=branches, name=name, costs=costs)
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(
                f"n-gram sizes from {min_ngram} to {max_ngram}: give 1 <= min_ngram <= max_ngram"
            )
        self._places, self._min_ngram = branches, min_ngram
        self._index = NgramIndex(min_ngram, max_ngram)
        self._reference, self._answers = reference, answers
        self._source = Realignment()

    def begin(self, tokens: Sequence[int]) -> None:
        """Index the prompt; the common part with the last one stays indexed."""
        super().begin(tokens)
        known = self._index.tokens
        # Another conversation: the counts of its matches need not hold here.
        if self.begins_alike or common_prefix(known, tokens) < len(known):
            self._index.clear()
            self._source = Realignment()
            self.start_over()
        self._index.extend(tokens[len(self._index.tokens) :])

    def rewind(self, length: int) -> None:
        """Take the tokens from position `length` on out of the index."""
        self._index.rewind(length)
        # The place was found by tokens that are taken back.
        self._source = Realignment()
        super().rewind(length)

    def retrieve(self, tokens: Sequence[int], length: int) -> Sequence[Continuation]:
        """Return the continuations of the places that the last tokens resemble most."""
        self._index.extend(tokens[len(self._index.tokens) :])
        return self._found(length)

    def guesses_beyond(self, request: DraftRequest, guessed: Sequence[int]) -> list[Guess]:
        """Return the likely nodes below tokens that are only guessed, of which nothing is kept.

        `guesses` of the same request comes before: the text is indexed then.
        """
        limits, length, source = self._limits(request), len(request.tokens), self._source
        limits.depth = min(limits.depth, request.max_depth - len(guessed))
        found = self._index.may_match(guessed) or source.may_resume(length + len(guessed))
        if not (found or self._reference or self._answers):
            return []
        self._source = dataclasses.replace(source)
        try:
            self._index.extend(guessed)
            return likely_nodes(self._found(self._depth), self._trust, limits)
        finally:
            self._index.rewind(length)
            self._source = source

    def _found(self, length: int) -> Sequence[Continuation]:
        """Return the continuations of the places that the end of the index resembles most."""
        index = self._index
        tokens, weight = index.tokens, 1.0
        found: list[Continuation] = []
        matches = index.matches(self._places)
        if matches:
            self._source.follow(*matches[0], len(index.tokens))
        resumed = self._source.resume(index)
        if resumed is not None and resumed[1] < FOUND_AGAIN:
            place, match = resumed
            found.append(Continuation(index.continuation(place, length), match, realigned=True))
            matches = [pair for pair in matches if pair[0] != place]
        for place, match in matches:
            known = index.continuation(place, length)
            found.append(Continuation(known, self._evidence(match), weight))
            weight *= _RECENCY
        if self._reference is not None:
            near = self._reference.nearest(tokens, _FROM_REFERENCE, length, self._min_ngram)
            found += [Continuation(known, match, weight) for match, known in near]
        if self._answers is not None:
            near = self._answers.nearest(tokens, _FROM_ANSWERS, length, self._min_ngram)
            found += counted(near)
        return found

    def _evidence(self, match: int) -> int:
        """Return how many of the matched tokens support their continuation.

        Of a formula that went on in many ways, such as the turn of a conversation, only the tokens
        after it show which of them this is; a match that reaches far beyond any formula is the
        same text again.
        """
        return min(match, self._index.since_fork(match) + 2 * max(0, match - _FORMULA))


def build_prompt_lookup(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `prompt-lookup(n=auto, nodes=15, branches=4, max_ngram=16, min_ngram=2, reference=F,
    always=no)`.

    Of n tokens as many are drafted as pay: n=auto is the usual bound. For a target that cannot
    branch `branches` is 1.
    """
    options = options_of(expression)
    path, vocabulary = options.optional("reference"), env.target.vocabulary
    n = options.length("n")
    make = functools.partial(
        PromptLookupDrafter,
        num_draft_tokens=env.bounded(MOST_DRAFTED) if n is None else n,
        nodes=options.optional_integer("nodes"),
        branches=options.integer("branches", 4 if env.target.can_branch else 1),
        max_ngram=options.integer("max_ngram", 16),
        min_ngram=options.integer("min_ngram", 2),
        reference=None if path is None else read_reference(Path(path).expanduser(), vocabulary),
        answers=env.answers,
        costs=env.curve,
        name=str(expression),
    )
    n_batch = env.context.n_batch
    return DrafterWeights(str(expression), lambda: make().fitting(n_batch), pace="paying")


def with_reference(text: str, reference: Path) -> str:
    """Return a drafter expression whose prompt lookups also read `reference`.

    Raises `OptionError` if there is no prompt lookup to read it, or it already has a reference.
    """
    found = 0

    def read(part: Expression) -> Expression:
        nonlocal found
        if part.atom != "prompt-lookup":
            return part
        found += 1
        if any(name == "reference" for name, _ in part.options):
            raise OptionError(f"{text} already names a reference: leave out {reference}")
        options = (*part.options, ("reference", Expression(str(reference))))
        return dataclasses.replace(part, options=options, is_call=True)

    expression = str(parse_expression(text).mapped(read))
    if not found:
        other = "leave out the reference" if text == "none" else f"ensemble({text}, prompt-lookup)"
        raise OptionError(
            f"a reference is read by prompt-lookup, which is not part of {text}: use "
            f"prompt-lookup, or {other}"
        )
    return expression
