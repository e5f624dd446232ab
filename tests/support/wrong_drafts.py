"""Wrong rules and drafters, which an enumeration has to see."""

from __future__ import annotations

import numpy as np

from specrun.runtime.acceptance import Acceptance, ExactRule, LawAt
from specrun.runtime.laws import Law, NoiseSource
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder
from support.enumeration import Propose
from support.scripted import LawTable, law_of


class DropsDuplicates(ExactRule):
    """Tests every child once, however often it was drawn."""

    def accept(
        self, tree: DraftTree, law_at: LawAt, noise: NoiseSource, position: int
    ) -> Acceptance:
        draws = {
            parent: tuple({draw.node: draw for draw in reversed(draws)}.values())[::-1]
            for parent, draws in tree.draws.items()
        }
        trimmed = DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)
        return super().accept(trimmed, law_at, noise, position)


def sorted_siblings(drafts: LawTable) -> Propose:
    """Re-sorts sampled siblings by their own probability: which is tested first depends on its
    value."""

    def propose(request: DraftRequest) -> DraftTree:
        if request.max_depth < 1:
            return DraftTree()
        law = law_of(drafts(request.tokens))
        tokens = sorted((request.noise.choose(law) for _ in range(2)), key=law.probability)
        tree = TreeBuilder()
        for token in tokens:
            tree.add(ROOT, token, law)
        return tree.build()

    return propose


def pruned_siblings(drafts: LawTable) -> Propose:
    """Keeps only the likelier of two sampled children."""

    def propose(request: DraftRequest) -> DraftTree:
        if request.max_depth < 1:
            return DraftTree()
        law = law_of(drafts(request.tokens))
        tokens = [request.noise.choose(law) for _ in range(2)]
        tree = TreeBuilder()
        tree.add(ROOT, max(tokens, key=law.probability), law)
        return tree.build()

    return propose


def top_k_as_if_sampled(drafts: LawTable) -> Propose:
    """Proposes the two most likely tokens and says that they were drawn (as llama.cpp's example
    does)."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        probs = drafts(request.tokens)
        for token in np.argsort(-probs)[:2]:
            tree.add(ROOT, int(token), law_of(probs))
        return tree.build()

    return propose


def siblings_without_removal(drafts: LawTable) -> Propose:
    """Draws without replacement, but states the whole law for the second draw too."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        law = law_of(drafts(request.tokens))
        first = request.noise.choose(law)
        tree.add(ROOT, first, law)
        tree.add(ROOT, request.noise.choose(law.without(first)), law)
        return tree.build()

    return propose


def falsely_stated(drafts: LawTable) -> Propose:
    """States another law than the one that the token was drawn from."""

    def propose(request: DraftRequest) -> DraftTree:
        tree = TreeBuilder()
        if request.max_depth < 1:
            return tree.build()
        token = request.noise.choose(law_of(drafts(request.tokens)))
        tree.add(ROOT, token, Law(np.full(drafts.size, 1 / drafts.size), np.arange(drafts.size)))
        return tree.build()

    return propose


WRONG_DRAFTERS = (sorted_siblings, pruned_siblings, top_k_as_if_sampled, siblings_without_removal)
