"""A small model of the same vocabulary drafts a chain (Leviathan et al. 2023; Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specrun.bindings.context import Context
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.draft_model_state import DraftModelState
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.law import Law
from specrun.runtime.prefix import common_prefix
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import DraftTree

__all__ = ["DraftModelDrafter", "DraftSampling"]

DraftSampling = Literal["with", "argmax"]


class DraftModelDrafter(Drafter):
    """Drafts up to `num_draft_tokens` tokens in a row with a model of its own.

    `sampling` "with" draws each token from the drafter's own law, transformed like the target's, and
    stores that law: acceptance is then min(1, p/q). "argmax" takes its most likely token as a point mass:
    better where the models are peaked, and the text stays plain decoding's own at every temperature.
    The chain ends early when the drafter's most likely token has probability below `p_min`: the law is
    read before the draw, so exactness holds.
    """

    def __init__(
        self,
        context: Context,
        *,
        target_vocab_size: int,
        num_draft_tokens: int = 5,
        sampling: DraftSampling = "with",
        p_min: float = 0.0,
        name: str = "draft",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(f"n is {num_draft_tokens}: a draft model must draft at least 1 token (or use none)")
        if not 0.0 <= p_min <= 1.0:
            raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")
        self.name = name
        self.max_nodes = num_draft_tokens
        self._sampling = sampling
        self._p_min = p_min
        self._context = context
        self._state = DraftModelState(context, target_vocab_size=target_vocab_size)

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self._context.native_seconds

    @property
    def n_params(self) -> int:
        """The draft model's parameters."""
        return self._context.model.n_params

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        self._state.rewind(common_prefix(self._state.cached, tokens))

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; shorter than asked where the drafter's own context ends or `p_min` stops it."""
        start = len(request.tokens)
        room = self._context.n_ctx - start + 1
        count = min(self.max_nodes, request.max_depth, request.max_nodes, room)
        if count < 1:
            return DraftTree()
        state = self._state
        state.rewind(min(len(state.cached), start - 1))  # the last token's row is needed again
        tokens: list[int] = []
        laws: list[Law] = []
        # A greedy law is a point mass too: there is nothing to draw, and no law to store.
        points = self._sampling == "argmax" or request.params.is_greedy
        row = state.feed(request.tokens[len(state.cached) :])
        while True:
            law = transformed_law(row, request.params, penalty_window(request.tokens, tokens, request.params))
            best, best_prob = law.most_likely
            if best_prob < self._p_min:
                break
            if points:
                tokens.append(best)
            else:
                request.noise.seek(start + len(tokens))
                tokens.append(request.noise.choose(law))
                laws.append(law)
            if len(tokens) == count:
                break
            row = state.feed_one(tokens[-1])
        return DraftTree.chain(tokens, None if points else laws)

    def observe(self, outcome: RoundOutcome) -> None:
        """Drop the cache of rejected tokens; the accepted ones stay evaluated."""
        base = len(outcome.tokens) - len(outcome.path) - (outcome.next_token is not None)
        self._state.rewind(base + common_prefix(self._state.cached[base:], outcome.tokens[base:]))

    def close(self) -> None:
        """Free the draft model's context and the model."""
        self._state.close()
