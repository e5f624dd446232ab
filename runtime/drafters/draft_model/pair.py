"""Pairs of vocabularies: drafts in the target's own tokens, in shared ones, or in text."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import PairError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.draft_model.token_map import (
    SpelledModelState,
    SpelledTreeState,
    TokenMap,
)
from specrun.runtime.drafters.draft_model.tree_state import DraftTreeState
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of
from specrun.runtime.pairing import check_can_draft, check_vocabularies

_NOTHING = 0.005  # of a text's tokens
_ENOUGH = 0.5  # of the target's tokens, by frequency: below it a drafter is heard better as text


@dataclass(frozen=True, slots=True)
class DraftPair:
    """A target's vocabulary and what a drafter's has of it.

    `tokens` is None where both have the same ids; `by_text` says that nothing but text is passed
    on. `remark` tells the user of a vocabulary that is not the target's, else "".
    """

    target_size: int
    tokens: TokenMap | None = None
    by_text: bool = False
    remark: str = ""

    @staticmethod
    def of(target: Model, draft: Model, expression: Expression) -> DraftPair:
        """Return what `vocabulary=auto|same|tokens|text` of a drafter expression comes to.

        "auto" takes the same ids where they mean the same, shared tokens where most of the
        target's are shared, and text otherwise. Raises `PairError` where nothing is in common, or
        the vocabulary is another one although "same" was asked for, and `UnsupportedModelError`.
        """
        check_can_draft(draft)
        ways = ["auto", "same", "tokens", "text"]
        options = options_of(expression)
        way = options.choice("vocabulary", ways, "auto")
        size = target.vocabulary.size
        if way in ("auto", "same"):
            try:
                check_vocabularies(target, draft)
            except PairError:
                if way == "same":
                    raise
            else:
                return DraftPair(size)
        try:
            tokens = TokenMap(target.vocabulary, draft.vocabulary)
        except PairError as error:
            raise PairError(f"{draft.path} cannot draft for {target.path}: {error}") from None
        other = f"{draft.path} has another vocabulary"
        if way == "text" or (way == "auto" and tokens.coverage < _ENOUGH):
            remark = f"{other}: its text is tokenized again, which costs some of every draft"
            return DraftPair(size, by_text=True, remark=f"{remark} (vocabulary=text)")
        shared = f"it drafts by the {tokens.n_shared:,} of {size:,} tokens that both have"
        lacking = 1.0 - tokens.coverage  # by frequency
        cost = f"; drafts end at the about {lacking:.0%} of a text's tokens that it lacks"
        cost = cost if lacking > _NOTHING else ", nearly all that texts are made of"
        return DraftPair(size, tokens, remark=f"{other}: {shared}{cost} (vocabulary=tokens)")

    def chain_state(self, context: Context) -> DraftModelState:
        """Return the cache of a drafter of chains."""
        if self.tokens is None:
            return DraftModelState(context, target_vocab_size=self.target_size)
        return SpelledModelState(context, self.tokens)

    def tree_state(self, context: Context) -> DraftTreeState:
        """Return the cache of a drafter of trees."""
        if self.tokens is None:
            return DraftTreeState(context, target_vocab_size=self.target_size)
        return SpelledTreeState(context, self.tokens)
