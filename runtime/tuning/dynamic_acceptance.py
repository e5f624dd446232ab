"""Acceptance of EAGLE-2's dynamic trees, measured along texts: what their shapes are planned from.

A dynamic tree hangs on the draft model's own tokens, so no acceptance by rank describes it. But its
nodes are point masses, and for those the exact rule draws the target's token and descends where a
child has it (`acceptance.exact`). So in a text that the target wrote, a round that starts at a
position keeps exactly the nodes that spell the text's next tokens: growing the tree there, without
the target, replays the round.

One expansion serves all shapes of the same `topk`: a smaller depth is a part of it, and fewer nodes
are those of highest value (`trees.eagle2_tree`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specrun.bindings.contexts.context import Context
from specrun.runtime.drafter import DraftRequest
from specrun.runtime.drafters.draft_model import DraftTreeDrafter, DraftTreeState
from specrun.runtime.law import FloatArray
from specrun.runtime.noise import SeededNoise
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.tree import ROOT
from specrun.runtime.trees import DynamicShape, GrownTree, expand_by_path_probability
from specrun.runtime.tuning.rank_acceptance import CalibrationText


@dataclass(frozen=True, slots=True)
class DynamicAcceptance:
    """The mean number of accepted tokens of dynamic trees with children of `topk` ranks.

    `accepted[d, n]` is that of depth d with the best n nodes, [max_depth + 1, max_nodes + 1];
    without the target's own token. It is 0 for depths at which no text was long enough to tell.
    """

    topk: int
    accepted: FloatArray

    @property
    def max_depth(self) -> int:
        """The deepest tree that was tried."""
        return len(self.accepted) - 1

    @property
    def max_nodes(self) -> int:
        """The most nodes that were kept."""
        return len(self.accepted[0]) - 1


def kept_nodes(grown: GrownTree, text: Sequence[int], max_depth: int, max_nodes: int) -> FloatArray:
    """Return how many tokens of `text` each shape keeps: [max_depth + 1, max_nodes + 1]."""
    path = _path_along(grown, text)
    depths = np.array(grown.depths, np.intp)
    order = np.array(grown.by_value(), np.intp)
    kept = np.zeros((max_depth + 1, max_nodes + 1))
    for depth in range(1, max_depth + 1):
        shallow = order[depths[order] <= depth]
        # Of the nodes of depth d at most, a shape keeps the n best: a node from n = its place + 1
        # on.
        places = np.empty(len(depths), np.intp)
        places[shallow] = np.arange(len(shallow))
        # Values fall along a path, so a shape keeps a beginning of it: kept nodes are accepted
        # tokens.
        for node in path[:depth]:
            kept[depth, places[node] + 1 :] += 1.0
    return kept


def measure_dynamic_acceptance(
    context: Context,
    texts: Sequence[CalibrationText],
    params: SamplingParams,
    *,
    topk: int,
    max_depth: int,
    max_nodes: int,
    target_vocab_size: int,
    seconds: float,
) -> DynamicAcceptance:
    """Grow trees along texts in about so many seconds, and return what they would have kept.

    The context is the draft model's, sized by `draft_size` for this depth and `topk`; it is left
    empty. Where time is short every second, third, ... position is taken.
    """
    shape = DynamicShape(max_depth, topk, max(max_nodes, max_depth))
    drafter = DraftTreeDrafter(
        DraftTreeState(context, target_vocab_size=target_vocab_size), shape=shape, sampling="argmax"
    )
    noise = SeededNoise(0).for_drafting(0)  # point masses draw nothing
    total = np.zeros((max_depth + 1, max_nodes + 1))
    counts = np.zeros(max_depth + 1)
    stride = 1
    for text in texts:
        drafter.begin(())
        start = text.n_prompt
        while start < len(text.tokens):
            before = time.perf_counter()
            request = DraftRequest(text.tokens[:start], params, noise, max_depth, shape.nodes)
            grown = expand_by_path_probability(max_depth, topk, drafter.laws(request))
            # Deeper trees could keep more than is known here.
            known = min(max_depth, len(text.tokens) - start)
            total[: known + 1] += kept_nodes(grown, text.tokens[start:], known, max_nodes)
            counts[: known + 1] += 1.0
            if counts[0] == 2:  # the first tree's time is mostly the prompt's
                positions = sum(len(text.tokens) - text.n_prompt for text in texts)
                stride = max(1, math.ceil(positions * (time.perf_counter() - before) / seconds))
            start += stride
    context.memory.clear()
    # By depth: positions near the end of a text tell of shallow trees alone.
    return DynamicAcceptance(topk, total / np.maximum(counts, 1.0)[:, None])


def _path_along(grown: GrownTree, text: Sequence[int]) -> list[int]:
    """Return the nodes that spell the beginning of `text`."""
    # Siblings have different tokens, so that a text follows one path at most.
    children = {key: node for node, key in enumerate(zip(grown.parents, grown.tokens, strict=True))}
    path: list[int] = []
    node = ROOT
    for token in text:
        child = children.get((node, token))
        if child is None:
            break
        path.append(child)
        node = child
    return path
