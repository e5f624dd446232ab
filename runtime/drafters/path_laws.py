"""Draft laws along the paths of a tree, and the tree that grows from them depth by depth.

Draft models, EAGLE's heads and Hydra's differ in what an evaluation returns, and in nothing else
here. Static shapes are grown as in `trees.growth`, dynamic ones (EAGLE-2) as in `trees.eagle2`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.heads import RankedTokens
from specrun.runtime.laws.law import Law, RankedLaw
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, penalty_window, transformed_law, transformed_laws
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.trees.eagle2 import DynamicShape, NodeChoice, path_probability_steps
from specrun.runtime.trees.growth import (
    LawSource,
    Steps,
    TreeSampling,
    drive,
    proposal_scheme,
    tree_steps,
)
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree

RANKED_TOKENS = 40
"""Tokens among which point masses are chosen where the settings do not truncate."""


@dataclass(slots=True)
class HighestLogits:
    """The tokens of the highest logits after n nodes, one more than top-k keeps: both [n, k + 1].

    Tokens ascend. As top-k leaves no others, they say the same law as whole rows, if no two of a
    row that top-k parts are equal.
    """

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]

    def laws(self, params: SamplingParams) -> list[Law]:
        """Return the laws that `params` make of the rows: plain ones, no bias, no penalties."""
        # In the order of their ids, as in a whole row, so that ties within the top k fall alike.
        return transformed_laws(list(self.logits), params, names=self.tokens)


EvaluatedDepth = RankedTokens | HighestLogits | Sequence[Logits]
"""What is said after n nodes: their best tokens, their highest logits, or whole rows of logits."""

Paths = Callable[[], list[list[int]]]
"""The drafted tokens down to each of the nodes that are evaluated, their own included."""


class PathLaws:
    """A drafter's laws after the tokens of a request: a `LawSource`.

    `root()` evaluates what stands before the draft, `below(parents, tokens, paths)` a depth of it,
    numbered as in `LawSource.below`. Best tokens are a law as they are; rows of logits are
    transformed by `params`, whose penalties see each node's own path.
    """

    def __init__(
        self,
        root: Callable[[], EvaluatedDepth],
        below: Callable[[Sequence[int], Sequence[int], Paths], EvaluatedDepth],
        request: DraftRequest,
        params: SamplingParams,
    ) -> None:
        self._root, self._below, self._request = root, below, request
        self._params = params
        self._parents: list[int] = []  # of all evaluated nodes
        self._tokens: list[int] = []

    def root(self) -> Law:
        """Return the law after the last committed token."""
        return self._laws(self._root(), _no_paths)[0]

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        """Evaluate one depth of the tree."""
        # Noted before the evaluation, which may ask for the paths.
        first = len(self._tokens)
        self._parents += parents
        self._tokens += tokens

        def paths() -> list[list[int]]:
            return [self._path(node) for node in range(first, first + len(tokens))]

        return self._laws(self._below(parents, tokens, paths), paths)

    def read(
        self, parents: Sequence[int], tokens: Sequence[int], said: EvaluatedDepth
    ) -> list[Law]:
        """Return the laws after a depth that was evaluated elsewhere; without tokens, the root."""
        first = len(self._tokens)
        self._parents += parents
        self._tokens += tokens
        nodes = range(first, first + len(tokens))
        return self._laws(said, lambda: [*map(self._path, nodes)] if tokens else [[]])

    def after(self, drafted: Sequence[int]) -> Law:
        """Return the law after a chain, whose laws before were asked for in turn."""
        # A chain's nodes are evaluated in turn: that before the last one has the number below.
        return self.below([len(drafted) - 2], drafted[-1:])[0] if drafted else self.root()

    def _laws(self, said: EvaluatedDepth, paths: Paths) -> list[Law]:
        if isinstance(said, RankedTokens):
            # Ranked on the head's device: there is no row left to transform.
            return list(RankedLaw.of_rows(said.tokens, said.log_probs))
        params, state = self._params, self._request.state
        if isinstance(said, HighestLogits):
            return said.laws(params)
        if not params.has_penalties:  # nobody asks for the paths
            return transformed_laws([*said], params, state)
        # The window that the target's law has at the node: penalties see its own path.
        windows = [penalty_window(self._request.tokens, path, params) for path in paths()]
        rows = zip(said, windows, strict=True)
        return [transformed_law(row, params, window, state) for row, window in rows]

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        path.reverse()
        return path


def _no_paths() -> list[list[int]]:
    return [[]]


def grow_draft(
    shape: Topology | DynamicShape,
    laws: LawSource,
    request: DraftRequest,
    *,
    room: int | None = None,
    sampling: TreeSampling = "argmax",
    p_min: float = 0.0,
    size: NodeChoice | None = None,
) -> DraftTree:
    """Return a tree of a shape, as far as the request's limits and the drafter's own allow.

    The rest is as for `draft_steps`.
    """
    steps = draft_steps(shape, request, room=room, sampling=sampling, p_min=p_min, size=size)
    return drive(steps, laws)


def _limits(request: DraftRequest, room: int | None) -> tuple[int, int]:
    """Return the greatest depth, and the most nodes: the last one of a tree is not evaluated."""
    most = request.max_nodes
    return request.max_depth, most if room is None else min(most, room + 1)


def draft_steps(
    shape: Topology | DynamicShape,
    request: DraftRequest,
    *,
    room: int | None = None,
    sampling: TreeSampling = "argmax",
    p_min: float = 0.0,
    size: NodeChoice | None = None,
) -> Steps[DraftTree]:
    """Grow a tree as `grow_draft` does, the laws given step by step.

    `room` is how many nodes the drafter can evaluate (None: any number); the last node of a tree
    never is. `sampling` says how the children of a static shape are proposed; at temperature 0 they
    are the most likely tokens. Nothing is drafted below a law that gives no token the probability
    `p_min`. With `size` a dynamic tree has only those nodes that pay.
    """
    max_depth, max_nodes = _limits(request, room)
    if max_nodes < 1 or max_depth < 1:
        return DraftTree()
    if isinstance(shape, DynamicShape):
        if room is not None:
            # It evaluates topk nodes of every depth but the last, more than it keeps.
            max_depth = min(max_depth, 1 + room // shape.topk)
        limited = shape.limited(max_depth, max_nodes)
        return (yield from path_probability_steps(limited, p_min, size))
    topology = shape.limited(max_depth, max_nodes)
    # A greedy law is sure of one token: draws from it would make no siblings.
    scheme = proposal_scheme("argmax" if request.params.is_greedy else sampling)
    start = len(request.tokens)
    return (yield from tree_steps(topology, scheme, request.noise, start, p_min))


def check_p_min(p_min: float) -> None:
    """Raise OptionError unless `p_min` is a probability."""
    if not 0.0 <= p_min <= 1.0:
        raise OptionError(f"p_min is {p_min}: it is a probability, between 0 and 1")


def ranking_params(params: SamplingParams, ranked: int) -> SamplingParams:
    """Return the settings that rank the `ranked` most likely tokens.

    Greedy settings make a law of one token, which ranks nothing and is always certain: temperature
    1 takes their place. Otherwise the ranking keeps the target's truncation: tokens that it can
    never say are not worth a node.
    """
    if params.is_greedy:
        return params.replace(temperature=1.0, top_k=ranked, top_p=1.0, min_p=0.0, mirostat=0)
    # top_k = 0 is no cut.
    return params.replace(top_k=min(params.top_k or ranked, ranked))
