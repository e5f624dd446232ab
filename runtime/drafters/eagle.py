"""EAGLE drafts in states of the target: static trees of EAGLE-1, dynamic ones of EAGLE-2 (Li et al. 2024).

The heads of EAGLE-1 and 2 read the target's final hidden states, those of EAGLE-3 (Li et al. 2025) inputs of some of
its layers. The head says which; nothing else differs here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.eagle_state import EagleState
from specrun.runtime.drafters.path_probability import DynamicShape, check_sampling, grow_by_path_probability
from specrun.runtime.drafters.pending_rows import copied_rows
from specrun.runtime.drafters.proposals import TreeSampling, proposal_scheme
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.drafters.tree_growth import grow_tree
from specrun.runtime.heads.pair_head import EagleRows, FloatRows, PairHead
from specrun.runtime.law import Law
from specrun.runtime.ranked_law import RankedLaw
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import penalty_window, transformed_law
from specrun.runtime.tree import ROOT, DraftTree

__all__ = ["EagleDrafter"]


class EagleDrafter(Drafter):
    """Grows a tree with a head that predicts hidden states, all nodes of a depth in one evaluation. Owns the head.

    A chain of the most likely words is one evaluation in all, where the head has a graph for that.

    `shape` is a fixed topology or a `DynamicShape`, which takes point masses only ("argmax"). Sampled schemes draw
    from the head's law, transformed like the target's; the head must then return whole rows. A node gets no children
    where the head gives no word the probability `p_min`.
    """

    def __init__(
        self,
        head: PairHead,
        shape: Topology | DynamicShape,
        *,
        sampling: TreeSampling = "argmax",
        p_min: float = 0.0,
        name: str = "eagle",
    ) -> None:
        check_sampling(shape, sampling)
        if not 0.0 <= p_min <= 1.0:
            raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")
        self.name = name
        self.needs_hidden_states = not head.taps
        self.layer_inputs = tuple(sorted(set(head.taps)))
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._head = head
        self._shape = shape
        self._sampling = sampling
        self._p_min = p_min
        # A chain that may end early goes by depth: at any size that matters a word costs more than Python does.
        self._is_whole_chain = isinstance(shape, Topology) and shape.n_leaves == 1 and p_min == 0.0
        self._state = EagleState(head)
        self._prompt: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the pairs of what the prompt shares with the last text."""
        self._prompt = list(tokens)
        self._state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Cache the prompt's pairs."""
        self._state.learn(start, self._features(rows, range(count)), self._prompt)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; none where the hidden state before the last token is not known."""
        if request.max_depth < 1 or request.max_nodes < 1:
            return DraftTree()
        ranks = self._sampling == "argmax" or request.params.is_greedy
        if ranks and self._is_whole_chain:
            chain = self._state.chain(request.tokens, min(self.max_nodes, request.max_depth, request.max_nodes))
            if chain is not None:
                return DraftTree.chain(chain.words)
        row = self._state.root(request.tokens)
        max_nodes = min(request.max_nodes, self._state.room())
        if row is None or max_nodes < 1:
            return DraftTree()
        laws = _HeadLaws(self._state, row, request, ranks=ranks)
        if isinstance(self._shape, DynamicShape):
            max_depth = min(request.max_depth, 1 + self._state.room() // self._shape.topk)
            return grow_by_path_probability(self._shape.limited(max_depth, max_nodes), laws, self._p_min)
        topology = self._shape.limited(request.max_depth, max_nodes)
        scheme = proposal_scheme("argmax" if ranks else self._sampling)
        return grow_tree(topology, laws, scheme, request.noise, len(request.tokens), self._p_min)

    def observe(self, outcome: RoundOutcome) -> None:
        """Cache real pairs of the root and the accepted nodes."""
        rows = outcome.path_rows[: outcome.n_new]  # after an end token nothing follows the last one
        if rows:
            self._state.learn(outcome.start - 1, self._features(outcome.rows, rows), outcome.tokens)

    def _features(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy of what the head reads of the target at these rows, [n, features]."""
        taps = self._head.taps
        if taps:
            return np.stack([np.concatenate([rows.layer_input(row, layer) for layer in taps]) for row in wanted])
        return copied_rows([rows.hidden_state(row) for row in wanted])

    @property
    def native_seconds(self) -> float:
        """Time in the head's graphs."""
        return self._head.native_seconds

    @property
    def n_params(self) -> int:
        """The head's parameters."""
        return self._head.n_params

    def close(self) -> None:
        """Free the head."""
        self._head.close()


class _HeadLaws:
    """The head as a source of laws: ranked words as they are, or whole rows transformed like the target's."""

    def __init__(self, state: EagleState, root: EagleRows, request: DraftRequest, *, ranks: bool) -> None:
        self._state = state
        self._root = root
        self._request = request
        self._ranks = ranks
        self._paths: list[list[int]] = []

    def root(self) -> Law:
        """Return the law after the last committed token, which was evaluated with it."""
        return self._law(self._root, 0, [])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        """Evaluate one depth of the tree."""
        rows = self._state.below(parents, tokens)
        if self._ranks:
            return list(RankedLaw.of_rows(rows.words, rows.log_probs))
        paths = [[*([] if a == ROOT else self._paths[a]), token] for a, token in zip(parents, tokens, strict=True)]
        self._paths += paths
        return [self._law(rows, row, path) for row, path in enumerate(paths)]

    def _law(self, rows: EagleRows, row: int, path: list[int]) -> Law:
        if self._ranks:
            return RankedLaw(rows.words[row], rows.log_probs[row])
        if rows.logits is None:
            raise OptionError("an EAGLE head that draws must be opened with whole rows")
        params, tokens = self._request.params, self._request.tokens
        return transformed_law(rows.logits[row], params, penalty_window(tokens, path, params))
