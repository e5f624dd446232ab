"""Cascades: a drafter drafts for the drafter (CS-Drafting, TriForce)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError
from specrun.runtime.acceptance import Acceptance, ExactRule, LawAt
from specrun.runtime.drafters.combinators.members import graft
from specrun.runtime.drafters.draft_model.window import KeptTokens
from specrun.runtime.drafters.growing.draft import RANKED_TOKENS, ranking_params
from specrun.runtime.drafters.growing.kept_rows import KeptRows, RowMemory
from specrun.runtime.drafters.tree_options import ChainSampling
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.noise import NoiseSource
from specrun.runtime.laws.transform import Logits, penalty_window, transformed_law
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.loop import (
    Conversation,
    DecodeSettings,
    Round,
    RoundLimits,
    decode_rounds,
)
from specrun.runtime.round.results import RoundCounter
from specrun.runtime.round.target import (
    CachedText,
    EvaluatedRows,
    PlacedRows,
    PromptLearner,
    TargetModel,
)
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import DraftTree

# == The cascade ===================================================================================
#
# The draft model decodes speculatively itself, in the same loop and by the same exact rule as the
# target. So every token that it emits, whether accepted, recovered or bonus, is a draw from its own
# transformed distribution given the text before it (Leviathan et al. 2023, theorem 3.5), and that
# distribution is the one that the target's acceptance has to divide by: never the residual that a
# recovered token happened to come from, and with no emitted token left out. To pass on accepted
# tokens only, or those under the inner drafter's distribution, would bias the text.
#
# The length of a chain may depend on the draws above its end, on the inner rounds, and on
# distributions that are read before anything is drawn from them. `DraftModelTarget` is the
# draft model in the target's place: it evaluates and verifies inside the cascade.


class CascadeDrafter(Drafter):
    """Drafts chains of `num_draft_tokens` tokens with a model that `inner` drafts for.

    `sampling` "with" draws from the model's own distribution, transformed like the target's;
    "argmax" takes its most likely tokens as point masses, so that the text stays plain decoding's
    own. `max_rounds` ends a chain after so many evaluations of the model (0: no limit): it is then
    long where `inner` guesses well, and cheap where it does not. A chain ends where the model's
    most likely token has probability below `p_min`. Owns the inner drafter and the model's context.
    """

    keeps_rows = True

    def __init__(
        self,
        model: DraftModelTarget,
        inner: Drafter,
        *,
        num_draft_tokens: int = 5,
        sampling: ChainSampling = "with",
        p_min: float = 0.0,
        max_rounds: int = 0,
        name: str = "cascade",
    ) -> None:
        if max_rounds < 0:
            advice = "give the most evaluations of the draft model, or 0 for any"
            raise OptionError(f"rounds is {max_rounds}: {advice}")
        if inner.reads_target:
            problem = "in a cascade it would draft for the draft model"
            raise OptionError(f"{inner.name} reads the target's hidden states, and {problem}")
        if inner.embedding_inputs is not None:
            problem = "in a cascade it would draft for the draft model"
            raise OptionError(f"{inner.name} looks ahead with the target's layers, and {problem}")
        self.name, self.max_nodes, self._model = name, num_draft_tokens, model
        self._sampling, self._p_min, self._max_rounds = sampling, p_min, max_rounds
        self._counter = RoundCounter()
        self._inner, self._kept = inner, model.kept
        if model.kept is not None:
            self.layer_inputs = model.kept.layer_inputs
        self.n_params = model.n_params + inner.n_params
        self.depth_params = model.depth_params + inner.depth_params
        inner.begins_alike = True  # how far it drafts well decides how many tokens are drawn
        self._row_memory = RowMemory()
        self._text = Conversation(inner)  # as model and inner drafter have it, guesses included

    @property
    def native_seconds(self) -> float:
        """Time inside the evaluations of both."""
        return self._model.native_seconds + self._inner.native_seconds

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of the prompt's common part with the last one."""
        self._counter = RoundCounter()
        self._model.rewind(self._text, common_prefix(self._text.tokens, tokens))
        if self._kept is not None:
            self._kept.begin(tokens)
        self._inner.begin(tokens)
        self._text.tokens = list(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; shorter if the context ends, `p_min` or `max_rounds` stop it."""
        start, points = len(request.tokens), self._sampling == "argmax" or request.params.is_greedy
        nodes = _ChainNodes(lambda drafted: self._row_after(request, start, drafted))
        rows: KeptRows | None = None
        if request.keep != "nothing":
            # A draw contains its distribution; so does, at temperature 0, the drafted token.
            copies = request.keep == "rows" or (points and not request.params.is_greedy)
            rows = KeptRows(self._row_memory, nodes, copies=copies)
        # The last drafted token is never evaluated, so it needs no position.
        room = self._model.n_positions - start + 1
        count = min(self.max_nodes, request.max_depth, request.max_nodes, room)
        if count < 1:
            return DraftTree() if rows is None else rows.of(DraftTree())
        text = self._text
        # The last token is evaluated as the root of the inner loop's first tree, not cached before.
        self._turn_to(request.tokens[:start])
        laws = self._draft(request, count, rows)
        tokens = text.tokens[start : start + len(laws)]
        nodes.tokens, nodes.n_evaluated = tokens, 0 if rows is None else rows.n_taken - 1
        tree = DraftTree.chain(tokens, None if points else laws)
        return tree if rows is None else rows.of(tree)

    def _turn_to(self, tokens: Sequence[int]) -> None:
        """Let the model have cached all of a text but its last token."""
        text, last = self._text, len(tokens) - 1
        self._model.rewind(text, last)
        text.tokens += tokens[len(text.tokens) :]
        self._model.prefill(text, last)

    def _row_after(
        self, request: DraftRequest, start: int, drafted: Sequence[int]
    ) -> Logits | None:
        """Evaluate the last of these tokens; return the model's row after it, None without room."""
        tokens = [*request.tokens[:start], *drafted]
        if len(tokens) > self._model.n_positions:
            return None
        self._turn_to(tokens)
        empty = DraftTree()
        row = self._model.evaluate(self._text, empty).logits(0)
        self._model.commit(self._text, empty, ())
        return row

    def _draft(self, request: DraftRequest, count: int, rows: KeptRows | None) -> list[Law]:
        """Let the model decode up to `count` tokens; return the drafted ones' distributions."""
        params = request.params
        # At temperature 0 the inner loop verifies against the model's argmax: it emits that,
        # whatever the inner drafter proposes.
        if self._sampling == "argmax":
            params = params.favourites()
        rule, model = _RemembersLaws(), self._model
        limits = RoundLimits(n_ctx=model.n_positions, max_nodes=model.max_nodes, max_tokens=count)
        settings = DecodeSettings(rule, params, limits, request.end_tokens, request.state)
        self._text.noise = request.noise
        laws: list[Law] = []
        rounds = filter(None, decode_rounds(model, self._text, settings))
        for number, this_round in enumerate(rounds, 1):
            tree, n_accepted, n_new = this_round.tree, len(this_round.path), len(this_round.new)
            self._counter.count(tree.n_candidates, tree.candidate_depth, n_accepted, n_new)
            # A distribution is stored for every emitted token, also the recovered and bonus ones:
            # the distribution at the node before it, never the residual that it came from.
            for index in range(len(this_round.new)):
                if rows is not None:
                    rows.take(len(laws) - 1, [this_round.logits_of(index)])
                if self._is_unsure(this_round, index, rule.laws, request):
                    return laws
                laws.append(rule.laws[this_round.node_before(index)])
            if number == self._max_rounds:
                break
        return laws

    def _is_unsure(
        self, this_round: Round, index: int, laws: Mapping[int, Law], request: DraftRequest
    ) -> bool:
        """Whether the distribution of a round's token ends the chain, whatever the token is."""
        if self._p_min == 0.0:
            return False
        # The distribution does not depend on the token drawn from it, so the stop may read it: a
        # stop by the token's own probability would bias the text.
        law = laws[this_round.node_before(index)]
        if len(law.probs) == 1:  # greedy: how certain is the distribution otherwise?
            tokens = self._text.tokens[: len(self._text.tokens) - len(this_round.new) + index]
            params = request.params
            params = ranking_params(params, RANKED_TOKENS) if params.is_greedy else params
            row = this_round.logits_of(index)
            law = transformed_law(row, params, penalty_window(tokens, (), params), request.state)
        return law.most_likely[1] < self._p_min

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Learn the target's states, by which the model's cache is chosen."""
        if self._kept is not None:
            self._kept.learn_prompt(start, rows, count)

    def observe(self, outcome: RoundOutcome) -> None:
        """Take back rejected tokens, from model and inner drafter; the rest stays evaluated."""
        if self._kept is not None:
            self._kept.learn_round(outcome)
        start = outcome.start
        # Rejected tokens are dropped from both caches at once, or the next draft would start wrong.
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


class _ChainNodes:
    """The tokens of a chain, the first of which are evaluated (`kept_rows.EvaluatedNodes`)."""

    def __init__(self, row_after: Callable[[Sequence[int]], Logits | None]) -> None:
        self.tokens: list[int] = []
        self.n_evaluated = 0
        self._row_after = row_after

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of an evaluated token."""
        node = parent + 1
        return node if node < self.n_evaluated else None

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate the last token."""
        row = self._row_after(self.tokens)
        return None if row is None else (parent + 1, row)

    def root(self) -> Logits | None:
        """Evaluate the text."""
        return self._row_after(())


class _RemembersLaws:
    """The exact rule, which keeps the distributions of the nodes visited in the last round."""

    name = "exact"
    exact = True

    def __init__(self) -> None:
        self.laws: dict[int, Law] = {}
        self._rule = ExactRule()

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        """Decide one round."""
        self.laws = {}

        def remembered(node: int) -> Law:
            self.laws[node] = law = law_at(node)
            return law

        return self._rule.accept(tree, remembered, noise, position)


JOINED_TOKENS = 1
"""How many missing tokens are evaluated with a tree; the context needs as many more output rows."""


class DraftModelTarget(TargetModel):
    """Evaluates trees like `TargetModel`, for text with tokens of a larger target's vocabulary.

    The model is fed a stand-in for tokens that it lacks, and rows are cut to the tokens that both
    models have: one outside has probability 0 in the draft, never in the target.

    A few tokens before the last one are evaluated together with the next tree: after a draft that
    was accepted as a whole its last token is still missing, and an evaluation of its own would cost
    as much as the whole tree.

    With `kept` its cache holds a window of a text of up to `n_positions` tokens. `text.n_cached`
    counts the tokens that were read, dropped ones included. The window moves where a draft begins,
    never within it. In `cascade(partial(...), b)` the target itself so verifies b's cheap drafts by
    all its weights, without the keys and values of a long text; only accepted ones read those
    (TriForce, Sun et al. 2024). A draft model that was trained for shorter texts keeps a window,
    too.
    """

    def __init__(
        self,
        context: Context,
        *,
        target_vocab_size: int,
        n_positions: int,
        kept: KeptTokens | None = None,
    ) -> None:
        super().__init__(context)
        vocabulary = context.model.vocabulary
        self.kept, self._n_positions = kept, n_positions
        self.n_params = context.model.n_params
        self.depth_params = multiplications(context.model)
        self._own_size = vocabulary.size
        self._shared_size = min(self._own_size, target_vocab_size)
        self._lacks_tokens = target_vocab_size > self._own_size
        self._stand_in = vocabulary.eos if vocabulary.eos is not None else 0

    @property
    def n_positions(self) -> int:
        """The most tokens that a text may have."""
        return self._n_positions

    def prefill(self, text: CachedText, end: int, learn: PromptLearner | None = None) -> None:
        """Evaluate the text up to `end`, unless so few tokens are missing that they join a tree."""
        if self.kept is not None:
            self._move(self.kept, text)
        if end - text.n_cached > JOINED_TOKENS:
            super().prefill(text, end, learn)

    def _move(self, kept: KeptTokens, text: CachedText) -> None:
        """Move the window to its place, if it has to; evaluate what is kept before it anew."""
        sink = kept.window.sink
        if not kept.is_to_move(len(text.tokens), text.n_cached):
            return
        # Before the cache: the stated cells must be there.
        text.n_cached = min(text.n_cached, sink)
        self.context.memory.truncate(text.n_cached)
        kept.move(len(text.tokens))
        if kept.first > sink:
            super().prefill(text, sink)  # however few are missing
            tokens = [text.tokens[place] for place in kept.between]
            for start, stop in self._pieces(0, len(tokens), self.context.n_batch):
                piece = self._fed(tokens[start:stop])
                self._batch.fill_chain(piece, sink + start, self._all_ids, 0)
                self.context.decode(self._batch)
            text.n_cached = kept.first  # the others in between are dropped

    def evaluate(self, text: CachedText, tree: DraftTree) -> EvaluatedRows:
        """Evaluate the missing part of the text and `tree` below it in one llama_decode."""
        if len(text.tokens) - 1 - text.n_cached + len(tree) > self.max_nodes:
            super().prefill(text, len(text.tokens) - 1)
        # Missing tokens become the chain above the tree: one evaluation reads the weights once.
        joined, n_missing = _joined(text, tree)
        tokens = self._fed([text.tokens[text.n_cached], *joined.tokens])
        rows = self._evaluate_at(self._cell(text.n_cached), tokens, joined.parents)
        return _Rows(rows, n_missing, self._shared_size)

    def commit(self, text: CachedText, tree: DraftTree, path: Sequence[int]) -> None:
        """Keep the evaluated root and these nodes, a path from the root down; drop the others."""
        joined, n_missing = _joined(text, tree)
        kept = [*range(n_missing), *(n_missing + node for node in path)]
        self._keep_at(self._cell(text.n_cached), joined.parents, kept)
        text.commit(tree.tokens[node] for node in path)

    def close(self) -> None:
        """Free the context; the model belongs to the weights. Calling it again does nothing."""
        self.context.close()

    def _fed(self, tokens: list[int]) -> list[int]:
        if not self._lacks_tokens:
            return tokens
        return [token if token < self._own_size else self._stand_in for token in tokens]

    def _cell(self, index: int) -> int:
        return index if self.kept is None else self.kept.cells(index)

    def _index(self, cell: int) -> int:
        return cell if self.kept is None else self.kept.tokens(cell)


def _joined(text: CachedText, tree: DraftTree) -> tuple[DraftTree, int]:
    """Return the tree below the first token that is not cached, and how many more there are."""
    missing = text.tokens[text.n_cached + 1 :]
    return graft(DraftTree.chain(missing), len(missing) - 1, tree)[0], len(missing)


class _Rows(PlacedRows):
    """An evaluation's rows without those of the first tokens, cut to the tokens of both models."""

    def __init__(self, rows: EvaluatedRows, skipped: int, size: int) -> None:
        super().__init__(rows, range(skipped, sys.maxsize))
        self._size = size

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of one row, a view of [shared tokens]."""
        return super().logits(row)[: self._size]
