"""Ouroboros (Zhao et al. 2024): a draft model, and a pool of phrases that verification feeds.

1. The draft model drafts with the pool: phrases after the last token are its own drafts, which it
   verifies itself (section 3.2), a cascade whose inner drafter is the pool.
2. Phrases after the draft's last token extend the draft as branches (section 3.3), point masses
  below it.
3. The target's evaluation answers at every node. The answers along the branches are refined
   phrases, which replace those that were drafted; the tokens after a rejected one with which it
   agrees are phrases too (sections 3.3 and 3.4). Both flow back, with the text's own.
4. The pool outlives the answer, and with a file the process: warm start (section 3.5).

The paper decodes greedily. Here drawn tokens keep their distributions, and phrases are point
masses, so every temperature is exact; which phrases there are depends on earlier rounds only. A
phrase is an n-gram of the pool: its tokens after the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specrun.runtime.drafters.combinators.members import MembersDrafter, first_path, graft
from specrun.runtime.drafters.lookahead import NgramPool, NgramStore, WindowGuard, add_phrases
from specrun.runtime.round.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows, PlacedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT, DraftTree


def phrase_tree(
    pool: NgramPool, last: int, count: int, max_depth: int, max_nodes: int
) -> DraftTree:
    """Return the `count` latest phrases after token `last`, merged by prefixes, as point masses."""
    builder = TreeBuilder()
    add_phrases(builder, pool.guesses(last, count), max_depth, max_nodes)
    return builder.build()


def refined_phrases(
    tree: DraftTree, first: int, rows: EvaluatedRows
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each path of a phrase tree, and as the target would have it: its answers at the nodes.

    `first` is the token before the phrases, `rows` are numbered as the tree's. A phrase N O X Q to
    which the target answers O, P, Q becomes N O P Q.
    """
    inner = set(tree.parents)
    # Row ROOT + 1 = 0 is the root's; leaves' answers are not used, so their rows are not read.
    answers = [_answer(rows, node) if node in inner else 0 for node in range(ROOT, len(tree))]
    for leaf in range(len(tree)):
        if leaf not in inner:
            path = tree.path_to(leaf)
            refined = [first, *(answers[tree.parents[node] + 1] for node in path)]
            yield [first, *(tree.tokens[node] for node in path)], refined


def matched_phrases(
    tokens: Sequence[int], nodes: Sequence[int], length: int, rows: EvaluatedRows
) -> Iterator[list[int]]:
    """Yield the parts of a rejected tail with which the target agrees: runs of its own next tokens.

    `tokens` stand at `nodes`, a path. Every phrase of up to `length` tokens ends with the target's
    own answer. A tail drafted on a wrong token often fits the right one: the target only rejected
    the tokens before it.
    """
    # Behind a rejection the target's answers follow the drafted tokens.
    answers = [_answer(rows, node) for node in nodes]
    start = 0
    for index, answer in enumerate(answers):
        if index + 1 < len(tokens) and answer == tokens[index + 1]:
            continue
        run = [*tokens[start : index + 1], answer]
        if len(run) > 2:  # else nothing was agreed with
            for begin in range(len(run) - 2):
                yield run[begin : begin + length]
        start = index + 1


def _answer(rows: EvaluatedRows, node: int) -> int:
    return int(rows.logits(node + 1).argmax())


class PhraseDrafter(Drafter):
    """Drafts phrases from a pool that others fill: for the draft model inside Ouroboros."""

    def __init__(self, store: NgramStore, *, count: int, length: int) -> None:
        self.name = f"phrases({count})"
        self.max_leaves = count
        self.max_nodes = count * length
        self._store, self._count = store, count

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the latest phrases that begin with the last token."""
        room = min(self.max_nodes, request.max_nodes)
        last, depth = request.tokens[-1], request.max_depth
        return phrase_tree(self._store.pool, last, self._count, depth, room)


class OuroborosDrafter(MembersDrafter):
    """Extends the chains of `draft` by up to `count` phrases of `length` tokens. Owns `draft`.

    `draft` is a cascade over a `PhraseDrafter` of the same `store`, or any drafter of chains. A
    `guard` leaves phrases out of the target's evaluations while they do not pay there.
    """

    def __init__(
        self,
        draft: Drafter,
        store: NgramStore,
        *,
        count: int = 3,
        length: int = 4,
        guard: WindowGuard | None = None,
        name: str = "ouroboros",
    ) -> None:
        super().__init__([draft], name=name)
        self.reads_logits = True
        self.keeps_rows = False  # phrases have none
        self.max_nodes = draft.max_nodes + count * length
        self.max_leaves = draft.max_leaves + count - 1
        self._draft, self._store, self._count = draft, store, count
        self._length, self._guard = length, guard
        self._read: list[int] = []
        self._proposal: _Proposal | None = None
        self._n_phrases = [0, 0]  # drafted, and used by at least one token

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer: the pool goes on, unless there are no tokens; then it starts over."""
        super().begin(tokens)
        self._proposal = None
        self._n_phrases = [0, 0]
        if not tokens:
            self._store.forget()
            self._read.clear()
            if self._guard is not None:
                self._guard.forget()
            return
        self._store.save()
        del self._read[common_prefix(self._read, tokens) :]
        self._learn_text(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the draft with phrases below its last token."""
        tree = self._draft.propose(request)
        chain = first_path(tree)
        # Phrases go below the path of first draws: point masses there may depend on draws.
        last = tree.tokens[chain[-1]] if chain else request.tokens[-1]
        depth = min(self._length, request.max_depth - len(chain))
        room = min(self._count * self._length, request.max_nodes - len(tree))
        if (self._guard is not None and not self._guard.is_open) or last in request.end_tokens:
            room = 0
        phrases = phrase_tree(self._store.pool, last, self._count, depth, room)
        whole, places = graft(tree, chain[-1] if chain else ROOT, phrases)
        self._proposal = _Proposal(whole, chain, phrases, places, last)
        # Only phrases directly below the draft count; longer ones are one guess.
        self._n_phrases[0] += len(phrases.draws.get(ROOT, ()))
        return whole

    def observe(self, outcome: RoundOutcome) -> None:
        """Put refined phrases, right tokens after a rejection, and the text into the pool."""
        proposal, self._proposal = self._proposal, None
        # A combinator above may have verified another tree: its rows are not those of the phrases.
        drafted = () if proposal is None else proposal.tree.tokens
        if proposal is not None and outcome.tree.tokens[: len(drafted)] == drafted:
            self._learn(outcome, proposal)
        self._draft.observe(outcome)
        self._learn_text(outcome.tokens)

    def _learn(self, outcome: RoundOutcome, proposal: _Proposal) -> None:
        chain = proposal.chain
        kept = common_prefix(chain, outcome.path)
        # The whole draft has to be accepted before a phrase is tested at all.
        self._n_phrases[1] += kept == len(chain) < len(outcome.path)
        if self._guard is not None:
            gained = len(outcome.path) - kept if kept == len(chain) else 0
            n_phrases = len(proposal.phrases)
            self._guard.count(len(proposal.tree) - n_phrases, n_phrases, gained, outcome.n_new)
        tail = [proposal.tree.tokens[node] for node in chain[kept:]]
        # The chain's rejected tail follows a wrong token: often right at another place.
        for phrase in matched_phrases(tail, chain[kept:], self._length + 1, outcome.rows):
            self._store.add(phrase)
        if len(proposal.phrases):
            places = [proposal.places[node] + 1 for node in range(ROOT, len(proposal.phrases))]
            rows = PlacedRows(outcome.rows, places)
            # Refinement replaces: tokens that the target would not choose make room (section 3.3).
            for phrase, refined in refined_phrases(proposal.phrases, proposal.last, rows):
                if phrase != refined:
                    self._store.replace(phrase, refined)
                else:
                    self._store.add(phrase)

    def _learn_text(self, tokens: Sequence[int]) -> None:
        """Add the phrases of the text that end after the part read before."""
        start = len(self._read)
        self._read.extend(tokens[start:])
        self._store.add_text(tokens, start, self._length + 1)

    def rewind(self, length: int) -> None:
        """Forget guesses; phrases that they made stay, as phrases may come from anywhere."""
        del self._read[length:]
        super().rewind(length)

    def report(self) -> dict[str, Any]:
        """Return how the phrases fared, and the draft model's own rounds."""
        drafted, used = self._n_phrases
        return {
            "phrases": {"pool": len(self._store.pool), "drafted": drafted, "used": used},
            **self._draft.report(),
        }


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A draft, its chain, the phrases below it, where these stand, and the token they follow."""

    tree: DraftTree
    chain: tuple[int, ...]
    phrases: DraftTree
    places: dict[int, int]
    last: int
