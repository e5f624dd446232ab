"""Phrases from a pool as branches of a draft tree, and what a target's answers make of them.

A phrase goes on after its first token. What the target says at every node of a tree, accepted or not, is known
after its evaluation, and makes new phrases (Ouroboros, Zhao et al. 2024, sections 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specrun.runtime.drafters.drafter import Drafter, DraftRequest
from specrun.runtime.drafters.ngram_pool import NgramPool
from specrun.runtime.drafters.ngram_store import NgramStore
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import ROOT, DraftTree, TreeBuilder

__all__ = ["PhraseDrafter", "matched_phrases", "phrase_tree", "refined_phrases"]


def phrase_tree(pool: NgramPool, last: int, count: int, max_depth: int, max_nodes: int) -> DraftTree:
    """Return the `count` latest phrases that begin with token `last`, merged by shared prefixes, as point masses."""
    builder = TreeBuilder()
    children: dict[tuple[int, int], int] = {}
    for phrase in pool.guesses(last, count):
        node = ROOT
        for token in phrase[: max(0, max_depth)]:
            child = children.get((node, token))
            if child is None:
                if len(builder) >= max_nodes:
                    return builder.build()
                child = children[node, token] = builder.add(node, token)
            node = child
    return builder.build()


def refined_phrases(tree: DraftTree, first: int, rows: EvaluatedRows) -> Iterator[list[int]]:
    """Yield each path of a phrase tree as the target would have it: its answers at the nodes, one after the other.

    `first` is the token before the phrases, `rows` are numbered as the tree's. A phrase N O X Q to which the target
    answers O, P, Q becomes N O P Q.
    """
    inner = set(tree.parents)
    answers = [_answer(rows, node) if node in inner else 0 for node in range(ROOT, len(tree))]
    for leaf in range(len(tree)):
        if leaf not in inner:
            yield [first, *(answers[tree.parents[node] + 1] for node in tree.path_to(leaf))]


def matched_phrases(
    tokens: Sequence[int], nodes: Sequence[int], length: int, rows: EvaluatedRows
) -> Iterator[list[int]]:
    """Yield what the target agrees with of a rejected tail: runs in which its answer is the next drafted token.

    `tokens` stand at `nodes`, a path. Every phrase of up to `length` tokens ends with the target's own answer. A tail
    drafted on a wrong token often fits the right one: the target only rejected what came before it.
    """
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
        self._store = store
        self._count = count

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the latest phrases that begin with the last token."""
        last = request.tokens[-1]
        return phrase_tree(
            self._store.pool, last, self._count, request.max_depth, min(self.max_nodes, request.max_nodes)
        )
