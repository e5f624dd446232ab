"""The options of a drafter expression about its tree.

Draft models and EAGLE's heads (`TreeOptions`), which draft a chain without any of them:

    tree=4x2x2                        branching factors by depth
    tree="0 1 00 01 000"              nodes, each the path of child ranks that leads to it
    tree=mc_sim_7b_63                 as the method's authors published it
    tree=sequoia, nodes=24, depth=6   the best tree of so many nodes (`planning.optimal_trees`)
    depth=5, topk=4, nodes=16         grown where the drafter is sure (EAGLE-2)

Medusa's and Hydra's heads (`head_tree`) take the first three, or plan a tree for their accuracies:

    nodes=24                          the best tree of so many nodes (`planning.optimal_trees`)
    (nothing)                         of the size with the most expected tokens a second
    accuracy=FILE.csv                 accuracies of a file, in place of those in the head's own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.growing.drafter import GrowingDrafter, check_p_min
from specrun.runtime.drafters.growing.source import Source
from specrun.runtime.heads import Accuracy, read_accuracy_csv
from specrun.runtime.language import Expression, ExpressionOptions, find_method, options_of
from specrun.runtime.planning import (
    TYPICAL_ACCURACY,
    AdaptiveExit,
    AdaptiveExitOptions,
    Plan,
    plan_medusa_tree,
)
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.round.drafter import Pace
from specrun.runtime.trees.eagle2 import DynamicShape, check_sampling
from specrun.runtime.trees.growth import TreeSampling
from specrun.runtime.trees.topology import MAX_NODES, Topology, check_leaves, parse_topology
from specrun.runtime.trees.tree import ROOT

_DEPTH, _TOPK, _NODES = 5, 4, 16
_PLANNED_NODES = 24


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """The options that describe a tree, None if they were not given."""

    tree: str | None = None
    depth: int | None = None
    topk: int | None = None
    nodes: int | Literal["auto"] | None = None
    n: int | Literal["auto"] | None = None
    published: Mapping[str, str] = field(default_factory=dict)
    """The nodes of trees that go by a name."""

    @staticmethod
    def of(expression: Expression) -> TreeOptions:
        """Return those of a drafter expression."""
        options = options_of(expression)
        return TreeOptions(
            tree=options.optional("tree"),
            depth=options.optional_integer("depth"),
            topk=options.optional_integer("topk"),
            nodes="auto" if options.is_auto("nodes") else options.optional_integer("nodes"),
            n="auto" if options.is_auto("n") else options.optional_integer("n"),
            published=find_method(expression.atom).published_trees,
        )

    @property
    def asks_for_tree(self) -> bool:
        """Whether any of them sets more than a chain."""
        return any(option is not None for option in (self.tree, self.depth, self.topk, self.nodes))

    @property
    def is_dynamic(self) -> bool:
        """Whether the tree grows by path probability."""
        return self.tree is None

    def shape(
        self, n_batch: int, plan: Callable[[int, int], Topology], largest: int
    ) -> Topology | DynamicShape:
        """Return the shape; `plan(nodes, depth)` makes Sequoia's, nodes=auto are `largest`.

        Raises `OptionError` for options that exclude each other and for trees that no evaluation
        can hold.
        """
        self._check_companions()
        shape: Topology | DynamicShape
        if self.tree is None:
            nodes = largest if self.nodes == "auto" else _given(self.nodes, _NODES)
            usual = min(_DEPTH, largest) if self.nodes == "auto" else _DEPTH
            shape = DynamicShape(_given(self.depth, usual), _given(self.topk, _TOPK), nodes)
        elif self.tree == "sequoia":
            shape = self._planned(plan)
        else:
            shape = parse_topology(self.published.get(self.tree, self.tree))
        size = shape.max_nodes
        # Each leaf needs a llama.cpp sequence, which is checked
        # here and not in ggml, where it aborts.
        check_leaves(f"a tree of {size} nodes", shape.max_leaves, "lower nodes")
        if size + 1 > n_batch:
            raise OptionError(
                f"a tree of {size} nodes and its root do not fit a batch of {n_batch}: use a "
                "smaller tree, or raise the batch size (-b)"
            )
        return shape

    def _planned(self, plan: Callable[[int, int], Topology]) -> Topology:
        if self.nodes == "auto":
            raise OptionError(
                f"tree={self.tree}, nodes=auto: only trees of depth= and topk= choose their size "
                "in every round; give a number, or leave out tree="
            )
        nodes = _given(self.nodes, _PLANNED_NODES)
        depth = _given(self.depth, min(nodes, MAX_NODES))
        if not 1 <= nodes <= MAX_NODES:
            raise OptionError(f"nodes is {nodes}: give 1 to {MAX_NODES}")
        if depth < 1:
            raise OptionError(f"depth is {depth}: give at least 1")
        if self.depth is not None and nodes < depth:
            raise OptionError(
                f"nodes={nodes} is less than depth={depth}: raise nodes or lower depth"
            )
        return plan(nodes, depth)

    def _check_companions(self) -> None:
        if self.n is not None:
            shape = f"tree={self.tree}" if self.tree is not None else "depth, topk or nodes"
            raise OptionError(f"n={self.n} drafts a chain and {shape} a tree: give one of them")
        if self.tree is None:
            return
        # Sequoia's planner takes nodes and depth; it finds its branching itself.
        extra: dict[str, int | str | None] = {"topk": self.topk}
        if self.tree != "sequoia":
            extra |= {"nodes": self.nodes, "depth": self.depth}
        for name, value in extra.items():
            if value is not None:
                raise OptionError(
                    f"tree={self.tree[:60]} already fixes the shape: leave out {name}={value}"
                )


ChainSampling = Literal["with", "argmax"]


@dataclass(frozen=True, slots=True)
class ChainOptions:
    """The options `n=auto, sampling=with, p_min=0` of a method of chains; n None is auto.

    `adaptive_exit` are the options of p_min=adaptive, None without it; with it `p_min` is 0.
    """

    n: int | None
    sampling: ChainSampling
    p_min: float
    adaptive_exit: AdaptiveExitOptions | None = None

    @staticmethod
    def of(
        expression: Expression,
        sampling: ChainSampling,
        adaptive_exit: AdaptiveExitOptions | None = None,
    ) -> ChainOptions:
        """Return those of an expression; `sampling` is the default."""
        options = options_of(expression)
        chosen = options.choice("sampling", list(get_args(ChainSampling)), sampling)
        p_min = 0.0 if adaptive_exit is not None else options.number("p_min", 0.0)
        check_p_min(p_min)
        return ChainOptions(
            options.length("n"), cast("ChainSampling", chosen), p_min, adaptive_exit
        )

    def within(self, n_batch: int) -> ChainOptions:
        """Return them; raises `OptionError` for chains that no batch holds."""
        if self.n is not None and not 1 <= self.n < n_batch:
            most = f"{n_batch - 1} tokens, as many as a batch holds"
            raise OptionError(f"n is {self.n}: give 1 to {most}")
        return self

    def drafts(self, expression: Expression, env: DraftEnvironment, most: int = 0) -> Drafts:
        """Return chains of n tokens, or of `most` (0: as many as pay) that a plan ends."""
        shape = Topology.chain(most or self.n or env.most_drafted)
        stops = self.n is None, self.adaptive_exit
        return Drafts(str(expression), env, shape, self.sampling, self.p_min, *stops)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The chains or trees that an expression describes, and the drafters that grow them.

    `is_planned`: a plan decides how long chains, or which nodes of dynamic trees, are each round.
    """

    name: str
    env: DraftEnvironment
    shape: Topology | DynamicShape
    sampling: TreeSampling = "argmax"
    p_min: float = 0.0
    is_planned: bool = False
    adaptive_exit: AdaptiveExitOptions | None = None

    def __post_init__(self) -> None:
        check_sampling(self.shape, self.sampling)
        check_p_min(self.p_min)

    @staticmethod
    def of(
        expression: Expression,
        env: DraftEnvironment,
        tree: TreeOptions,
        shape: Topology | DynamicShape,
        sampling: TreeSampling = "argmax",
    ) -> Drafts:
        """Return those of an expression's tree, planned with nodes=auto or n=auto."""
        is_chain = tree.n == "auto" and not tree.asks_for_tree
        is_planned = is_chain or (tree.nodes == "auto" and isinstance(shape, DynamicShape))
        p_min = options_of(expression).number("p_min", 0.0)
        return Drafts(str(expression), env, shape, sampling, p_min, is_planned)

    def drafter(
        self, source: Source, share: float, text_share: Callable[[], float] | None = None
    ) -> GrowingDrafter:
        """Return the drafter of a source that reads `share` of the target for each depth.

        `text_share` is read in addition to its weights (`DraftEnvironment.draft_plan`). If that
        fails, the source is closed.
        """
        try:
            plan: Plan | None = None
            if self.adaptive_exit is not None:
                # The threshold is learnt: each conversation has its own.
                plan = AdaptiveExit(self.adaptive_exit)
            elif self.is_planned:
                depth = self.shape.depth if isinstance(self.shape, DynamicShape) else None
                plan = self.env.draft_plan(share, text_share, depth=depth)
            return GrowingDrafter(
                source,
                self.shape,
                sampling=self.sampling,
                p_min=self.p_min,
                plan=plan,
                name=self.name,
            )
        except BaseException:
            source.close()
            raise

    @property
    def pace(self) -> Pace:
        """The decisions about drafts that measured time may make."""
        return self.env.pace_of(chooses=self.is_planned, draws=self.sampling != "argmax")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def tree_sampling(options: ExpressionOptions, default: TreeSampling) -> TreeSampling:
    """Return how the children of a node are proposed: the option `sampling`."""
    return cast("TreeSampling", options.choice("sampling", list(get_args(TreeSampling)), default))


def head_tree(
    expression: Expression,
    env: DraftEnvironment,
    *,
    stored: Accuracy | None,
    n_depths: int,
    depth_cost: float,
    typical: Accuracy = TYPICAL_ACCURACY,
) -> Topology:
    """Return the tree of the expression, or the planned one.

    `stored` are the accuracies of the head's file, `typical` stands in for them if nothing was
    measured, `n_depths` is the depth of its guesses, `depth_cost` the cost of a depth of them in
    evaluations of the target with one token. Raises OptionError, and MalformedFileError for a bad
    CSV.
    """
    options = options_of(expression)
    tree = options.optional("tree")
    if tree is not None:
        for name in ("nodes", "accuracy"):
            if options.optional(name) is not None:
                problem = f"tree= names the nodes; leave out {name}="
                raise OptionError(f"{expression}: {problem}")
        return parse_topology(find_method(expression.atom).published_tree(tree))
    nodes = options.optional_integer("nodes")
    if nodes is not None and nodes > MAX_NODES:
        raise OptionError(f"{expression}: nodes is {nodes}: give 1 to {MAX_NODES}")
    accuracy = head_accuracy(options, n_depths, stored) or typical[:n_depths]
    accuracy = verifiable(accuracy, env)
    if nodes is not None:
        topology = medusa_tree(accuracy, nodes)
    else:
        curve = env.curve
        # The root is in the same batch and the same context,
        # hence 1 less; Medusa's own trees have 63.
        most = max(1, min(63, env.context.n_batch - 1, env.n_ctx - 1))
        seconds = depth_cost * curve.seconds(1)
        topology = plan_medusa_tree(accuracy, curve, seconds, most=most).topology
    check_leaves(expression, topology.n_leaves)
    return topology


def verifiable(accuracy: Accuracy, env: DraftEnvironment) -> Accuracy:
    """Return the accuracies of nodes that the target can verify: of a hybrid those of a chain."""
    return accuracy if env.target.can_branch else tuple(row[:1] for row in accuracy)


def head_accuracy(
    options: ExpressionOptions, n_depths: int, stored: Accuracy | None
) -> Accuracy | None:
    """Return the accuracies of `accuracy=`, else those of the head's file; None without either."""
    given = options.optional("accuracy")
    if given is not None:
        return read_accuracy_csv(Path(given).expanduser(), n_depths)
    return None if stored is None else stored[:n_depths]


def ranks_by_depth(topology: Topology) -> Sequence[int]:
    """Return how many tokens are named at each depth: the widest branching there."""
    widest = [0] * topology.max_depth
    for parent, children in topology.children.items():
        depth = 0 if parent == ROOT else topology.depths[parent]
        widest[depth] = max(widest[depth], len(children))
    return widest
