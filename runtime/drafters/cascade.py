"""A drafter drafts for the drafter: CS-Drafting's vertical cascade (Chen et al. 2023, section 3.1), staged decoding.

The draft model decodes speculatively itself, in the same loop and by the same exact rule as the target. So every
token that it emits, whether accepted, recovered or bonus, is a draw from its own transformed law given the text
before it (Leviathan et al. 2023, theorem 3.5), and that law is what the target's acceptance has to divide by: never
the residual that a recovered token happened to come from, and with no emitted token left out. To pass on accepted
tokens only, or those under the inner drafter's law, would bias the text.

How far a chain goes may be decided by what was drawn above its end, by how the inner rounds went, and by laws that
are read before anything is drawn from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance.exact import ExactRule
from specrun.runtime.acceptance.rule import Acceptance, LawAt
from specrun.runtime.conversation import Conversation
from specrun.runtime.drafters.draft_model import DraftSampling
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.model_drafter import RANKED_WORDS, ranking_params
from specrun.runtime.law import Law
from specrun.runtime.loop import DecodeSettings, Round, decode_rounds
from specrun.runtime.noise import NoiseSource
from specrun.runtime.planning.limits import RoundLimits
from specrun.runtime.prefix import common_prefix
from specrun.runtime.statistics import RoundCounter
from specrun.runtime.target import CachedText, Target
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import DraftTree

__all__ = ["CascadeDrafter", "InnerTarget"]


class InnerTarget(Target, Protocol):
    """What a cascade needs of its draft model; tests pass scripted ones."""

    @property
    def n_ctx(self) -> int:
        """The context size in tokens."""

    @property
    def max_nodes(self) -> int:
        """The most tree nodes one evaluation can take beside the root."""

    @property
    def native_seconds(self) -> float:
        """Time inside the model's evaluations."""

    @property
    def n_params(self) -> int:
        """The model's parameters."""

    def rewind(self, text: CachedText, length: int) -> None:
        """Drop everything of the text after its first `length` tokens."""

    def prefill(self, text: CachedText, end: int) -> None:
        """Evaluate the text's tokens up to position `end`, or leave some of them to the next evaluation."""

    def close(self) -> None:
        """Free what it holds of this conversation."""


class CascadeDrafter(Drafter):
    """Drafts chains of `num_draft_tokens` tokens with a model that `inner` drafts for.

    `sampling` "with" draws from the model's own law, transformed like the target's; "argmax" takes its most likely
    tokens as point masses, so that the text stays plain decoding's own. `max_rounds` ends a chain after so many
    evaluations of the model (0: no limit): it is then long where `inner` guesses well, and cheap where it does not.
    A chain ends where the model's most likely token has probability below `p_min`. Owns the inner drafter and the
    model's context.
    """

    def __init__(
        self,
        model: InnerTarget,
        inner: Drafter,
        *,
        num_draft_tokens: int = 5,
        sampling: DraftSampling = "with",
        p_min: float = 0.0,
        max_rounds: int = 0,
        name: str = "cascade",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(f"n is {num_draft_tokens}: a draft model must draft at least 1 token (or use none)")
        if not 0.0 <= p_min <= 1.0:
            raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")
        if max_rounds < 0:
            raise OptionError(f"rounds is {max_rounds}: give the most evaluations of the draft model, or 0 for any")
        if inner.reads_target:
            raise OptionError(
                f"{inner.name} reads the target's hidden states, and in a cascade it would draft for the draft model"
            )
        self.name = name
        self.max_nodes = num_draft_tokens
        self._model = model
        self._sampling = sampling
        self._p_min = p_min
        self._max_rounds = max_rounds
        self._counter = RoundCounter()
        self._inner = inner
        self._text = Conversation(inner)  # as model and inner drafter know it, guesses included

    @property
    def native_seconds(self) -> float:
        """Time inside the evaluations of both."""
        return self._model.native_seconds + self._inner.native_seconds

    @property
    def n_params(self) -> int:
        """The parameters of both."""
        return self._model.n_params + self._inner.n_params

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
        self._counter = RoundCounter()
        self._model.rewind(self._text, common_prefix(self._text.tokens, tokens))
        self._inner.begin(tokens)
        self._text.tokens = list(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; shorter than asked where the model's own context ends, or `p_min` or `max_rounds` stop it."""
        start = len(request.tokens)
        # The last drafted token is never evaluated, so it needs no position.
        count = min(self.max_nodes, request.max_depth, request.max_nodes, self._model.n_ctx - start + 1)
        if count < 1:
            return DraftTree()
        text = self._text
        self._model.rewind(text, start - 1)
        text.tokens += request.tokens[len(text.tokens) :]
        self._model.prefill(text, start - 1)
        laws = self._draft(request, count)
        points = self._sampling == "argmax" or request.params.is_greedy
        return DraftTree.chain(text.tokens[start : start + len(laws)], None if points else laws)

    def _draft(self, request: DraftRequest, count: int) -> list[Law]:
        """Let the model decode up to `count` tokens, appended to the text; return the law of each that counts."""
        params = request.params.replace(temperature=0.0) if self._sampling == "argmax" else request.params
        rule = _RemembersLaws()
        limits = RoundLimits(n_ctx=self._model.n_ctx, max_nodes=self._model.max_nodes, max_tokens=count)
        self._text.noise = request.noise
        laws: list[Law] = []
        rounds = decode_rounds(self._model, self._text, DecodeSettings(rule, params, limits, request.end_tokens))
        for number, one in enumerate(rounds, 1):
            self._counter.count(one.tree.n_candidates, one.tree.candidate_depth, len(one.path), len(one.tokens))
            for index in range(len(one.tokens)):
                if self._is_unsure(one, index, rule.laws, request):
                    return laws
                laws.append(rule.laws[one.node_before(index)])
            if number == self._max_rounds:
                break
        return laws

    def _is_unsure(self, one: Round, index: int, laws: Mapping[int, Law], request: DraftRequest) -> bool:
        """Whether the law of a round's token, read without looking at the token, ends the chain."""
        if self._p_min == 0.0:
            return False
        law = laws[one.node_before(index)]
        if len(law.probs) == 1:  # a greedy law is always certain: what would it be otherwise?
            tokens = self._text.tokens[: len(self._text.tokens) - len(one.tokens) + index]
            params = request.params
            params = ranking_params(params, RANKED_WORDS) if params.is_greedy else params
            row = one.rows.logits(one.row_before(index))
            law = transformed_law(row, params, penalty_window(tokens, (), params))
        return law.most_likely[1] < self._p_min

    def observe(self, outcome: RoundOutcome) -> None:
        """Take back what was rejected, from the model's cache and the inner drafter; the rest stays evaluated."""
        start = outcome.start
        self.rewind(start + common_prefix(self._text.tokens[start:], outcome.tokens[start:]))

    def rewind(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        if length < len(self._text.tokens):
            self._model.rewind(self._text, length)
            self._inner.rewind(length)

    def report(self) -> dict[str, Any]:
        """Return how the draft model's own rounds went."""
        counter = self._counter
        return {
            "inner": {
                "drafter": self._inner.name,
                "rounds": counter.rounds,
                "drafted": counter.drafted,
                "accepted": counter.accepted,
                "acceptance_rate": counter.acceptance_rate,
                "mean_accepted_length": counter.mean_accepted_length,
                **self._inner.report(),
            }
        }

    def close(self) -> None:
        """Free the inner drafter, then the model's context."""
        try:
            self._inner.close()
        finally:
            self._model.close()


class _RemembersLaws:
    """The exact rule, which keeps the laws of the nodes that it visited in the last round."""

    name = "exact"
    exact = True

    def __init__(self) -> None:
        self.laws: dict[int, Law] = {}
        self._rule = ExactRule()

    def accept(self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int) -> Acceptance:
        """Decide one round."""
        self.laws = {}

        def remembered(node: int) -> Law:
            self.laws[node] = law = law_at(node)
            return law

        return self._rule.accept(tree, remembered, noise, position)
