"""Drafts tokens drawn from an n-gram law (Leviathan et al. 2023, section 4.1: bigram models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.costs.draft_length import DraftLength
from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.kept_rows import KeptRows, RowMemory
from specrun.runtime.drafters.ngram.smoothing import Counts, NgramLaw
from specrun.runtime.drafters.ngram.text_counts import GrowingCounts
from specrun.runtime.grammar import GrammarState
from specrun.runtime.law import IdArray, Law
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits, transformed_law
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import RANKED_TOKENS, check_p_min, draft_chain, ranking_params

NgramSampling = Literal["with", "argmax"]


class NgramRows(KeptRows):
    """Logarithms of the smoothed law at the places of a draft, as rows of logits."""

    def __init__(self, memory: RowMemory, law: NgramLaw, last: Sequence[int]) -> None:
        super().__init__(memory, copies=False)
        self._law, self._last = law, last

    def _found(self, node: int) -> Logits | None:
        tree = self._tree
        path = [tree.tokens[above] for above in tree.path_to(node)]
        law = self._law.after([*self._last, *path])
        if law is None or law.ids is None:
            return None
        row = np.full(int(law.ids.max()) + 1, -np.inf, np.float32)
        row[law.ids] = np.log(law.probs)
        return row


class NgramDrafter(Drafter):
    """Drafts up to `num_draft_tokens` tokens by counts of the text so far, and of `sources`.

    `sampling` "with" draws each token from the smoothed law, cut and tempered like the target's,
    and stores that law; "argmax" takes its most likely token as a point mass. Penalties and biases
    of the target are not applied: they would cost the whole vocabulary, and what they change is
    tested all the same. `p_min` ends a chain before a token of a law that gives none so much; with
    `length` a chain is as long as it pays.
    """

    keeps_rows = True

    def __init__(
        self,
        order: int,
        sources: Sequence[Counts] = (),
        *,
        num_draft_tokens: int = 5,
        sampling: NgramSampling = "with",
        p_min: float = 0.0,
        length: DraftLength | None = None,
        name: str = "ngram",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(f"n is {num_draft_tokens}: draft at least 1 token (or use none)")
        check_p_min(p_min)
        self.name, self.max_nodes = name, num_draft_tokens
        self._text = GrowingCounts(order)
        self._law = NgramLaw([*sources, self._text])
        self._sampling, self._p_min, self._length = sampling, p_min, length
        self._order = max(order, *(source.order for source in sources), 1)
        self._drafted: Sequence[int] = ()
        self._row_memory = RowMemory()

    def begin(self, tokens: Sequence[int]) -> None:
        """Count the prompt; what it shares with the text before stays counted."""
        self._text.begin(tokens)
        if self._length is not None:
            self._length.begin()

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; none before anything was counted."""
        tokens, params = request.tokens, request.params
        self._text.extend(tokens[len(self._text.tokens) :])
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        place = request.state.grammar
        if place is not None:
            place = place.after(tokens[place.length :])
        last = list(tokens[1 - self._order :]) if self._order > 1 else []
        if self._law.after(last) is None:
            return DraftTree()
        points = self._sampling == "argmax" or params.is_greedy
        if self._length is not None:
            self._length.start(points=points)
        if params.is_greedy:
            params = ranking_params(params, RANKED_TOKENS)  # a greedy law is always certain
        params = without_penalties(params)
        tree = draft_chain(
            lambda drafted: self._law_after(last, drafted, params, place),
            request.noise,
            len(tokens),
            most=count,
            points=points,
            threshold=self._p_min,
            stop=self._length,
            end_tokens=request.end_tokens,
        )
        self._drafted = tree.tokens
        if request.keep in ("nothing", "points"):
            return tree
        return NgramRows(self._row_memory, self._law, last).of(tree)

    def _law_after(
        self,
        last: list[int],
        drafted: Sequence[int],
        params: SamplingParams,
        place: GrammarState | None,
    ) -> Law:
        law = self._law.after([*last, *drafted])
        assert law is not None  # what was counted once is counted in every context
        return transformed(law if place is None else allowed(law, place.after(drafted)), params)

    def observe(self, outcome: RoundOutcome) -> None:
        """Count what was committed; learn how far drafts pay."""
        self._text.extend(outcome.tokens[len(self._text.tokens) :])
        if self._length is not None:
            self._length.observe(self._drafted, outcome)
        self._drafted = ()

    def rewind(self, length: int) -> None:
        """Take back the tokens from position `length` on."""
        self._text.cut(length)


def without_penalties(params: SamplingParams) -> SamplingParams:
    """Return the settings that cut and temper, without those that name tokens."""
    if not (params.has_penalties or params.logit_bias):
        return params
    off = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return params.replace(logit_bias={}, grammar=None, **off)


def allowed(law: Law, place: GrammarState) -> Law:
    """Return a law on few tokens given that a grammar allows them; itself, if it allows none."""
    ids = np.arange(len(law.probs)) if law.ids is None else law.ids
    weights = np.where(place.allowed(ids), law.probs, 0.0)
    kept = weights.nonzero()[0]
    return Law.normalised(weights[kept], ids[kept]) if len(kept) else law


def transformed(law: Law, params: SamplingParams) -> Law:
    """Return a law on few tokens as settings without penalties cut and temper it."""
    # In float32, as every model's rows: transforms expect that.
    row = np.log(law.probs).astype(np.float32)
    found = transformed_law(row, params)
    return Law(found.probs, _chosen(law.ids, found.ids))


def _chosen(ids: IdArray | None, places: IdArray | None) -> IdArray | None:
    return ids if places is None else places if ids is None else ids[places]
