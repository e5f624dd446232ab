"""Traces of rounds: the draft tree, both distributions, the accepted path and the times.

They are made only for requests with `trace`. Distributions are read after the acceptance rule has
read them and before anything is committed, so a trace changes neither draft nor text.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np

from specrun.bindings.errors import SpecrunError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.acceptance import Acceptance, LawAt
from specrun.runtime.engine.slots import EvaluationCost
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.results import SpecStats
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees.tree import ROOT, DraftTree

BEST = 6
"""How many tokens of a distribution a trace names: as many as one reads at a glance."""


@dataclass(frozen=True, slots=True)
class NamedToken:
    """A token, its text (control tokens by name), and its probability in some distribution."""

    token: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True)
class TracedNode:
    """A node of the draft tree. `parent` -1 is the last committed token.

    `target` is the token's probability after its parent in the target's distribution, `model` that
    before sampling settings, `draft` that in the drafter's: None if the token was proposed as a
    point mass. A node that is no `candidate` was evaluated and could not be accepted: it has none
    of them.
    """

    token: int
    text: str
    parent: int
    depth: int
    candidate: bool
    target: float | None
    model: float | None
    draft: float | None


@dataclass(frozen=True, slots=True)
class TracedLaws:
    """The most likely tokens after a node (-1: after the last committed token), best first.

    `target` is the distribution by the settings of sampling, which acceptance reads; `model` is
    before them. `draft` is the one that drafts were drawn from; empty if the drafter has none.
    """

    node: int
    target: tuple[NamedToken, ...]
    model: tuple[NamedToken, ...]
    draft: tuple[NamedToken, ...]


@dataclass(frozen=True, slots=True)
class RoundSeconds:
    """Seconds of one round: native evaluation of target and drafter, Python, and waiting.

    With several conversations `target` is a share of the common evaluation, and `waiting` the time
    of work for the others. Making the trace is in none of them.
    """

    target: float
    drafter: float
    python: float
    waiting: float


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round. `path` are the accepted nodes from the root down.

    `drafter` proposed the tree: of `auto`, the drafter that it chose. `next_token` is the target's
    own token after the path: None if an end token was accepted. If `recovered`, it took the place
    of rejected drafts; otherwise it came for nothing. `position` is the index of the round's first
    token, counted from the prompt's first. `tokens` to `acceptance_by_depth` are of the whole
    answer so far, this round included.
    """

    number: int
    position: int
    drafter: str
    rule: str
    greedy: bool
    nodes: tuple[TracedNode, ...]
    laws: tuple[TracedLaws, ...]
    path: tuple[int, ...]
    next_token: NamedToken | None
    recovered: bool
    seconds: RoundSeconds
    evaluation: EvaluationCost
    tokens: int
    tokens_per_round: float | None
    acceptance_by_depth: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as a mapping, ready for JSON."""
        return dataclasses.asdict(self)


_Seen = tuple[tuple[TracedNode, ...], tuple[TracedLaws, ...], NamedToken, Acceptance]
"""A round at the moment of its decision: the token is the target's own after the path."""


@dataclass(slots=True)
class Clocks:
    """Seconds so far: native ones of target and drafter, all of the slot's own, and on the wall."""

    target: float
    drafter: float
    own: float
    wall: float = field(default_factory=time.perf_counter)


class Tracer:
    """Traces the rounds of one answer: `witness` reads a decided round, `trace` then returns it."""

    def __init__(self, vocabulary: Vocabulary, *, greedy: bool) -> None:
        self._vocabulary = vocabulary
        self._greedy = greedy
        self._texts: dict[int, str] = {}
        self._seen: _Seen | None = None
        self._spent = 0.0  # on reading, which counts for no part of the round
        self._number = 0
        self._length = self._tokens = 0
        self._before = Clocks(0.0, 0.0, 0.0)

    def begin(self, n_prompt: int, now: tuple[float, float, float]) -> None:
        """Take the time when the first round begins: the prompt's tokens have been read."""
        self._length, self._before = n_prompt, Clocks(*now)

    def witness(
        self, tree: DraftTree, rows: EvaluatedRows, law_at: LawAt, accepted: Acceptance
    ) -> None:
        """Note both distributions of a round's tree, and the accepted path."""
        started = time.perf_counter()
        try:
            self._seen = self._read(tree, rows, law_at, accepted)
        except SpecrunError:  # a row that no rule has read may be broken
            self._seen = None
        self._spent += time.perf_counter() - started

    def _read(
        self, tree: DraftTree, rows: EvaluatedRows, law_at: LawAt, accepted: Acceptance
    ) -> _Seen:
        path, candidate = accepted.path, tree.is_candidate
        end = path[-1] if path else ROOT
        # The distribution below a rejected leaf explains no decision.
        places = sorted({end, *compress(tree.parents, candidate)})
        target = {place: law_at(place) for place in places}
        model = {place: _softmax(rows.logits(place + 1)) for place in places}
        draft = {place: _draft_law(tree, place) for place in places}
        laws = tuple(
            TracedLaws(place, *(self._best(law[place]) for law in (target, model, draft)))
            for place in places
        )
        own = accepted.next_token
        chosen = NamedToken(own, self._text(own), target[end].probability(own))
        nodes: list[TracedNode] = []
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            after = [law.get(parent) if candidate[node] else None for law in (target, model, draft)]
            probabilities = [None if law is None else law.probability(token) for law in after]
            shape = parent, tree.depths[node], candidate[node]
            nodes.append(TracedNode(token, self._text(token), *shape, *probabilities))
        return tuple(nodes), laws, chosen, accepted

    def trace(
        self,
        n_tokens: int,
        stats: SpecStats,
        cost_of: Callable[[int], EvaluationCost],
        now: Callable[[], tuple[float, float, float]],
    ) -> RoundTrace | None:
        """Return the trace of the round after which the text has `n_tokens` tokens.

        None if nothing was read. `stats` are the answer's so far; `cost_of` returns the cost of the
        evaluation in which it had so many tokens.
        """
        seen, self._seen = self._seen, None
        start, self._length = self._length, n_tokens
        n_new, before, after = n_tokens - start, self._before, Clocks(*now())
        self._tokens += n_new
        told = None
        if seen is not None:
            nodes, laws, chosen, accepted = seen
            # An accepted token that ends the answer cuts the path below it.
            ended = n_new <= len(accepted.path)
            # Of `auto`, the drafter that it chose for the round.
            arms, choices = stats.drafting.get("arms"), stats.drafting.get("choices")
            drafter = arms[choices[-1][0]]["drafter"] if arms and choices else stats.drafter
            target, drafting = after.target - before.target, after.drafter - before.drafter
            own, wall = after.own - before.own, after.wall - before.wall
            python = max(0.0, own - self._spent - target - drafting)
            told = RoundTrace(
                number=self._number,
                position=start,
                drafter=str(drafter),
                rule=stats.rule,
                greedy=self._greedy,
                nodes=nodes,
                laws=laws,
                path=accepted.path[:n_new],
                next_token=None if ended else chosen,
                recovered=accepted.rejected and not ended,
                seconds=RoundSeconds(target, drafting, python, max(0.0, wall - own)),
                evaluation=cost_of(1 + len(nodes)),
                tokens=self._tokens,
                tokens_per_round=stats.mean_accepted_length,
                acceptance_by_depth=stats.acceptance_by_position,
            )
        self._number += 1
        self._spent, self._before = 0.0, Clocks(*now())
        return told

    def _best(self, law: Law | None) -> tuple[NamedToken, ...]:
        """Return the most likely tokens of a distribution, best first, none of probability 0."""
        if law is None:
            return ()
        probs, ids = law.probs, law.ids
        places = np.arange(len(probs))
        if len(probs) > BEST:
            places = np.argpartition(-probs, BEST - 1)[:BEST]
        places = places[np.argsort(-probs[places], kind="stable")]
        tokens = (places if ids is None else ids[places]).tolist()
        pairs = zip(tokens, probs[places].tolist(), strict=True)
        return tuple(NamedToken(token, self._text(token), p) for token, p in pairs if p > 0.0)

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._vocabulary.label(token)
        return text


def _draft_law(tree: DraftTree, place: int) -> Law | None:
    """Return the distribution that drafts after a node were drawn from, or the drafter's row."""
    # Of several draws, the first is from the distribution itself: see `loop.law_pairs`.
    draws = tree.draws.get(place, ())
    law = next((draw.law for draw in draws if draw.law is not None), None)
    if law is not None or tree.rows is None or not draws:
        return law
    row = tree.rows.logits(place)
    return None if row is None else _softmax(row)


def _softmax(row: Logits) -> Law:
    """Return a row's distribution before any setting."""
    weights = np.exp(row - row.max(), dtype=np.float64)
    return Law(weights / weights.sum())
