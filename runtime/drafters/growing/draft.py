"""A draft in the making: the distributions after its nodes, by the rows of a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from specrun.runtime.drafters.growing.kept_rows import KeptRows
from specrun.runtime.drafters.growing.source import Asked, NodeRows, Source, whole_rows
from specrun.runtime.laws.law import Law, RankedLaw
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import (
    Logits,
    greedy_token,
    lead,
    penalty_window,
    transformed_law,
    transformed_laws,
)
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.trees.growth import Steps
from specrun.runtime.trees.tree import ROOT

RANKED_TOKENS = 40
"""Tokens among which point masses are chosen if the settings do not truncate."""

GrownT = TypeVar("GrownT")
RowSteps = Generator[Asked, Any, GrownT]
"""A draft that grows: yields nodes to evaluate, and receives rows or named children, or None."""


# == Settings of a draft's distributions ===========================================================


def without_penalties(params: SamplingParams) -> SamplingParams:
    """Return the settings that cut and temper, without those that name tokens."""
    if not (params.has_penalties or params.logit_bias):
        return params
    off = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return params.replace(logit_bias={}, grammar=None, **off)


def ranking_params(params: SamplingParams, ranked: int) -> SamplingParams:
    """Return the settings that rank the `ranked` most likely tokens.

    Greedy settings make a distribution of one token, which ranks nothing and is always certain:
    temperature 1 takes their place. Otherwise the ranking keeps the target's truncation: tokens
    that it can never emit are not worth a node.
    """
    if params.is_greedy:
        return params.replace(temperature=1.0, top_k=ranked, top_p=1.0, min_p=0.0, mirostat=0)
    # top_k = 0 is no cut.
    return params.replace(top_k=min(params.top_k or ranked, ranked))


# == One draft =====================================================================================


class _Favourite(RankedLaw):
    """The most likely token of a row, chosen without a distribution."""

    __slots__ = ("_certainty", "_row", "_token")

    def __init__(self, row: Logits, token: int, certainty: float | None = None) -> None:
        self._row, self._token, self._certainty = row, token, certainty

    def best(self, count: int) -> list[tuple[int, float]]:
        """Return the token; its probability is not worked out."""
        return [(self._token, 1.0)]

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token, and its probability among it and the second one, unless one is stated."""
        sure = self._certainty
        return self._token, lead(self._row, self._token) if sure is None else sure

    def rated(self, certainty: float) -> _Favourite:
        """Return it with a stated certainty."""
        return _Favourite(self._row, self._token, certainty)


class _RatedLaw(Law):
    """A distribution whose certainty its method states, in place of its greatest probability."""

    __slots__ = ("_certainty",)

    def __init__(self, law: Law, certainty: float) -> None:
        super().__init__(law.probs, law.ids)
        self._certainty = certainty

    @property
    def most_likely(self) -> tuple[int, float]:
        """The token of highest probability, and the stated certainty."""
        return super().most_likely[0], self._certainty


def _rated(law: Law, certainty: float) -> Law:
    return law.rated(certainty) if isinstance(law, _Favourite) else _RatedLaw(law, certainty)


class Draft:
    """A draft in the making: its evaluated nodes, and the distributions after them.

    Ranked tokens are a distribution as they are; rows of logits are transformed by `params`, whose
    penalties see each node's own path. `points`: tokens are chosen, not drawn. `favourites`: only
    the most likely token is read. `kept` keeps the rows if a rule reads them.
    """

    def __init__(
        self,
        source: Source,
        request: DraftRequest,
        params: SamplingParams,
        *,
        points: bool,
        favourites: bool = False,
    ) -> None:
        self._source, self._request, self._params = source, request, params
        self._points, self._favourites = points, favourites
        self._start = len(request.tokens)
        self._parents: list[int] = []  # of all evaluated nodes
        self._tokens: list[int] = []
        self.room = source.room(request.tokens)
        self.kept: KeptRows | None = None

    def grown(self, steps: Steps[GrownT]) -> RowSteps[GrownT | None]:
        """Let steps receive distributions of rows; return their result, None without any row."""
        try:
            parents, tokens = next(steps)
            while True:
                rows = yield parents, tokens
                if rows is None or rows.is_empty:
                    return None
                first = len(self._tokens) if tokens else ROOT
                self._parents += parents
                self._tokens += tokens
                if self.kept is not None:
                    self.kept.take(first, whole_rows(rows))
                laws = self._laws(first, rows)
                if rows.certainties is not None:
                    laws = [*map(_rated, laws, rows.certainties)]
                parents, tokens = steps.send(laws)
        except StopIteration as ended:
            done: GrownT = ended.value
            return done

    def _laws(self, first: int, rows: NodeRows) -> list[Law]:
        """Return the distributions after nodes from number `first` on, by their rows."""
        if rows.ranked is not None and self._points:
            return list(RankedLaw.of_rows(rows.ranked.tokens, rows.ranked.log_probs))
        params, state = self._params, self._request.state
        if rows.highest is not None:
            return rows.highest.laws(without_penalties(params))
        whole = whole_rows(rows)
        if not self._favourites and not params.has_penalties:
            if all(row is whole[0] for row in whole):  # as of a block's slot: one for all
                return [transformed_law(whole[0], params, (), state)] * len(whole)
            return transformed_laws([*whole], params, state)
        windows = [self._window(node) for node in range(first, first + len(whole))]
        pairs = list(zip(whole, windows, strict=True))
        if self._favourites:
            return [_Favourite(row, greedy_token(row, params, own, state)) for row, own in pairs]
        return [transformed_law(row, params, window, state) for row, window in pairs]

    def _window(self, node: int) -> Sequence[int]:
        """Return the text that penalties see at a node: that of the target's distribution there."""
        if not self._params.has_penalties:
            return ()
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        return penalty_window(self._request.tokens, path[::-1], self._params)

    # -- its nodes, for rules that read rows (`kept_rows.EvaluatedNodes`) --------------------------

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the evaluated node of a token below another, None if none is."""
        for node, named in enumerate(zip(self._parents, self._tokens, strict=True)):
            if named == (parent, token):
                return node
        return None

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node."""
        if len(self._tokens) >= self.room:
            return None
        rows = self._source.below([parent], [token])
        if rows is None:
            return None
        self._parents.append(parent)
        self._tokens.append(token)
        return len(self._tokens) - 1, whole_rows(rows)[0]

    def root(self) -> Logits | None:
        """Evaluate the text of the draft, which may have grown since."""
        if self.room < 0:
            return None
        text = self._request.tokens[: self._start]
        rows = self._source.root(dataclasses.replace(self._request, tokens=text), 0)
        return None if rows is None else whole_rows(rows)[0]
