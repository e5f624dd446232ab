"""Sequoia's hardware-aware choice: the tree that yields the most tokens a second on this machine.

Chen et al. (2024, section 3.3) pick size and depth by F(N, D) / (T(N) + D t) with constant t. Here
the draft model's time depends on how many nodes a depth evaluates, t(w), so that a bushy tree pays
for its width: the plan maximises F(tree) / (T(N + 1) + sum over depths of t(w_d)) over all trees.

For given widths the best tree is known: acceptance falls with rank, so at each depth the nodes to
evaluate are those of highest value, each has a first child, and the rest are the most valuable of
all their children. The search goes over the widths, depth by depth: all of them for small
trees, a beam of the most promising for large ones. A beginning is given up where even the dynamic
programme's tree, which ignores widths, could not make up for the time already spent.

For EAGLE-2's dynamic trees (Li et al. 2024) the objective is the same: over depth d, `topk` k and n
kept nodes, maximise (1 + accepted(d, k, n)) / (T(n + 1) + t(1) + (d - 1) t(k)). The draft model
evaluates k nodes at each depth but the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from specrun.runtime.laws.law import FloatArray
from specrun.runtime.planning import RoundCosts, SequoiaProgramme
from specrun.runtime.planning.optimal_trees import expected_tokens
from specrun.runtime.trees import DynamicShape, Topology
from specrun.runtime.trees.tree import ROOT
from specrun.runtime.tuning.acceptance import DynamicAcceptance

_BEAM = 100  # more than there are beginnings of trees of 8 nodes: those are searched exhaustively
_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)


@dataclass(frozen=True, slots=True)
class TreePlan:
    """A fixed tree or a dynamic shape with its expected yield: tokens a round, and a second."""

    shape: Topology | DynamicShape
    expected_tokens: float
    tokens_per_second: float

    @property
    def size(self) -> tuple[int, int]:
        """Nodes and depth."""
        if isinstance(self.shape, DynamicShape):
            return self.shape.nodes, self.shape.depth
        return len(self.shape), self.shape.max_depth


def fastest_plan(plans: Iterable[TreePlan], costs: RoundCosts, tolerance: float) -> TreePlan | None:
    """Return the smallest plan at most `tolerance` (a share) slower than the fastest plan.

    None if plain decoding is at least as fast as any. Fewer nodes are fewer guesses about the
    machine.
    """
    worth = [plan for plan in plans if plan.tokens_per_second > 1.0 / costs.plain_seconds]
    if not worth:
        return None
    fastest = max(plan.tokens_per_second for plan in worth)
    good = [plan for plan in worth if plan.tokens_per_second >= (1.0 - tolerance) * fastest]
    return min(good, key=lambda plan: (plan.size, -plan.tokens_per_second))


def tokens_per_second(topology: Topology, acceptance: Sequence[float], costs: RoundCosts) -> float:
    """Return the tokens a second that this tree yields; an empty tree is plain decoding."""
    if not len(topology):
        return 1.0 / costs.plain_seconds
    seconds = costs.round_seconds(len(topology), topology.inner_widths)
    return expected_tokens(topology, acceptance) / seconds


def plan_tree(
    acceptance: Sequence[float],
    costs: RoundCosts,
    *,
    sizes: Sequence[int] = tuple(range(1, 64)),
    max_depth: int = 8,
    tolerance: float = 0.0,
) -> TreePlan | None:
    """Return the fastest tree, or None if plain decoding is at least as fast.

    `sizes` are the numbers of nodes it may have.
    With a `tolerance` the smallest tree is taken that is at most this share slower than the best.
    An `acceptance` that rises with rank is taken for noise and levelled.
    """
    # Taking nodes by value is the best choice only if acceptance falls with rank.
    levelled = np.minimum.accumulate(np.clip(np.asarray(acceptance, np.float64), 0.0, 1.0))
    levelled = levelled[levelled > 0.0]
    if not len(levelled):
        return None
    search = _Search(levelled, costs, sorted(set(sizes)), max_depth, tolerance)
    search.run()
    shares = levelled.tolist()
    plans = [
        TreePlan(tree, expected_tokens(tree, shares), tokens_per_second(tree, shares, costs))
        for tree in search.best_trees()
    ]
    return fastest_plan(plans, costs, tolerance)


@dataclass(slots=True)
class _Beginning:
    """All trees that evaluate `widths` nodes at their first depths, drafted in `seconds`.

    `level` are the values of the nodes evaluated last. Evaluated nodes and the first child of each
    are in the tree, `n_fixed` of them worth `fixed` together; `free` are the values of the other
    children, the highest first.
    """

    widths: list[int]
    seconds: float
    level: FloatArray
    fixed: float = 0.0
    n_fixed: int = 0
    free: FloatArray = field(default_factory=lambda: np.zeros(0))
    children: FloatArray = field(default_factory=lambda: np.zeros(0))
    is_first: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    speed: float = 0.0

    def grow(self, acceptance: FloatArray) -> None:
        """Make the children of the nodes evaluated last, the most valuable first."""
        values = np.outer(self.level, acceptance)
        is_first = np.zeros(values.shape, np.bool_)
        is_first[:, 0] = True
        # Of equal values first children first, which are in the tree in any case; then the earlier
        # parent and the lower rank, so that plans repeat.
        order = np.lexsort((~is_first.ravel(), -values.ravel()))
        self.children, self.is_first = values.ravel()[order], is_first.ravel()[order]

    def stopped(self) -> tuple[float, int, FloatArray]:
        """Return `fixed`, `n_fixed` and `free` of the trees that evaluate no more children."""
        first = self.is_first
        free = np.sort(np.concatenate([self.free, self.children[~first]]))[::-1]
        return self.fixed + float(self.children[first].sum()), self.n_fixed + int(first.sum()), free

    def longer(self, width: int, seconds: float, most: int) -> _Beginning:
        """Return the trees that evaluate the best `width` children too, of size `most` at most."""
        # A node that is evaluated belongs to the tree and has a child there: without one its
        # evaluation would be wasted.
        fixed = self.is_first.copy()
        fixed[:width] = True
        return _Beginning(
            [*self.widths, width],
            self.seconds + seconds,
            self.children[:width],
            self.fixed + float(self.children[fixed].sum()),
            self.n_fixed + int(fixed.sum()),
            np.sort(np.concatenate([self.free, self.children[~fixed]]))[::-1][:most],
        )


@dataclass(slots=True)
class _Search:
    acceptance: FloatArray
    costs: RoundCosts
    sizes: list[int]
    max_depth: int
    tolerance: float
    best_speed: float = 0.0
    # By the number of nodes: speed, and widths by depth.
    best: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    _verify: FloatArray = field(init=False)
    _bound: FloatArray = field(init=False)
    _cheapest: float = field(init=False)

    def __post_init__(self) -> None:
        most = self.sizes[-1]
        programme = SequoiaProgramme(self.acceptance.tolist(), most, self.max_depth)
        self._verify = np.array([self.costs.verify_seconds(size) for size in self.sizes])
        depths = range(self.max_depth + 1)
        # [depth, size]: more tokens than the programme's tree, for which widths cost nothing, has
        # none.
        bound = [[programme.value(size, depth) for size in self.sizes] for depth in depths]
        self._bound = np.array(bound)
        # At least this for any further depth, be its graph the first, reused or rebuilt (width +
        # 1).
        self._cheapest = min(
            self.costs.depth_seconds(width, before)
            for width in _WIDTHS
            for before in (None, width, width + 1)
        )

    def run(self) -> None:
        """Try widths depth by depth, going on from the most promising beginnings."""
        beginnings = [_Beginning([1], self.costs.depth_seconds(1, None), np.ones(1))]
        for depth in range(1, self.max_depth + 1):
            for beginning in beginnings:
                beginning.grow(self.acceptance)
                self._stop_here(beginning)
            if depth == self.max_depth:
                return
            beginnings.sort(key=lambda start: -start.speed)
            beginnings = [
                longer
                for start in beginnings[:_BEAM]
                if not self._hopeless(depth, start.seconds)
                for longer in self._longer(start)
            ]

    def _longer(self, beginning: _Beginning) -> Iterator[_Beginning]:
        most = self.sizes[-1]
        for width in _WIDTHS:
            # Widths ascend: the wider ones do not fit either.
            if width > len(beginning.children):
                return
            seconds = self.costs.depth_seconds(width, beginning.widths[-1])
            longer = beginning.longer(width, seconds, most)
            # Evaluated nodes bring at least one first child on top.
            if longer.n_fixed + 1 > most:
                return
            yield longer

    def _stop_here(self, beginning: _Beginning) -> None:
        """Note the yield of trees of all sizes with these widths and no more."""
        fixed, n_fixed, free = beginning.stopped()
        # Entry i: the worth of the i best free children.
        totals = np.concatenate([[0.0], np.cumsum(free)])
        places = [i for i, size in enumerate(self.sizes) if n_fixed <= size < n_fixed + len(totals)]
        if not places:
            return
        tokens = 1.0 + fixed + totals[[self.sizes[i] - n_fixed for i in places]]
        speeds = tokens / (self._verify[places] + beginning.seconds)
        beginning.speed = float(speeds.max())
        self.best_speed = max(self.best_speed, beginning.speed)
        for i, speed in zip(places, speeds.tolist(), strict=True):
            size = self.sizes[i]
            if size not in self.best or speed > self.best[size][0]:
                self.best[size] = speed, beginning.widths

    def _hopeless(self, depth: int, drafting: float) -> bool:
        """Whether no deeper tree can be faster than the best so far."""
        further = np.arange(1, self.max_depth - depth + 1)
        seconds = self._verify[None, :] + drafting + (further * self._cheapest)[:, None]
        # The most tokens over the least time that deeper trees could have, [further depths, sizes].
        highest = float((self._bound[depth + 1 :] / seconds).max())
        return highest <= self.best_speed * (1.0 - self.tolerance)

    def best_trees(self) -> list[Topology]:
        """Return the best tree of each size."""
        return [_layout(self.acceptance, widths, size) for size, (_, widths) in self.best.items()]


def _layout(acceptance: FloatArray, widths: Sequence[int], size: int) -> Topology:
    """Return the best tree of `size` nodes that evaluates `widths` nodes at its depths."""
    # The search kept values alone; here its choices are made again, with nodes.
    values, parents, depths = [1.0], [ROOT], [0]  # entry 0 is the root
    fixed: set[int] = set()
    level = [0]
    for depth, width in enumerate(widths, 1):
        if depth > 1:
            # Chosen by value, then put back in the order in which they are numbered.
            ranked = sorted(level, key=lambda node: (-values[node], node not in fixed, node))
            level = sorted(ranked[:width])
            fixed |= set(level)
        first = len(values)
        for parent in level:
            fixed.add(len(values))
            for share in acceptance.tolist():
                values.append(values[parent] * share)
                parents.append(parent)
                depths.append(depth)
        level = list(range(first, len(values)))
    free = [node for node in range(1, len(values)) if node not in fixed]
    free.sort(key=lambda node: (-values[node], depths[node], node))
    kept = sorted([*fixed, *free[: size - len(fixed)]])
    places = {0: ROOT} | {node: place for place, node in enumerate(kept)}
    return Topology(tuple(places[parents[node]] for node in kept))


def plan_dynamic_tree(
    measured: Sequence[DynamicAcceptance],
    costs: RoundCosts,
    *,
    sizes: Sequence[int],
    tolerance: float = 0.0,
) -> TreePlan | None:
    """Return the fastest shape, or None if plain decoding is at least as fast.

    `sizes` are the numbers of nodes it may keep. With a `tolerance` the smallest shape is taken
    that is at most this share slower than the best.
    """
    plans: list[TreePlan] = []
    for acceptance in measured:
        topk = acceptance.topk
        for depth in range(1, acceptance.max_depth + 1):
            # The root has topk children; each further depth expands topk nodes into topk each.
            most = min(topk + (depth - 1) * topk**2, acceptance.max_nodes)
            widths = [1, *[topk] * (depth - 1)]
            for nodes in (size for size in sizes if depth <= size <= most):
                tokens = 1.0 + float(acceptance.accepted[depth, nodes])
                speed = tokens / costs.round_seconds(nodes, widths)
                plans.append(TreePlan(DynamicShape(depth, topk, nodes), tokens, speed))
    return fastest_plan(plans, costs, tolerance)
