"""Which tree heads draft: the one that was named, or the best for their measured accuracies on this machine.

tree=4x2x2, tree="0 1 00"       as for draft models (`topology`)
tree=mc_sim_7b_63               as the method's authors published it (`Method.published_trees`)
nodes=24                        the best tree of so many nodes for the heads' accuracies (`planning.medusa_tree`)
nothing                         the same, of the size with the most expected tokens a second over the target's costs
accuracy=FILE.csv               accuracies of a file, in place of those that stand in the head's own
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import DraftEnvironment
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.topology import MAX_NODES, Topology, check_leaves, parse_topology
from specrun.runtime.heads.node_accuracy import Accuracy, read_accuracy_csv
from specrun.runtime.methods import find_method
from specrun.runtime.planning.medusa_tree import TYPICAL_ACCURACY, medusa_tree, plan_medusa_tree
from specrun.runtime.tree import ROOT

__all__ = ["head_accuracy", "head_tree", "ranks_by_depth"]


def head_tree(
    expression: Expression,
    options: ExpressionOptions,
    environment: DraftEnvironment,
    *,
    stored: Accuracy | None,
    n_depths: int,
    depth_cost: float,
    typical: Accuracy = TYPICAL_ACCURACY,
) -> Topology:
    """Return the tree that the expression asks for, or the planned one.

    `stored` are the accuracies of the head's file, `typical` what stands in for them where nothing was measured,
    `n_depths` how deep its guesses reach, `depth_cost` what a depth of them costs in evaluations of the target with one
    token. Raises OptionError, and MalformedFileError for a bad CSV.
    """
    tree, nodes = options.optional("tree"), options.optional_integer("nodes")
    if tree is not None:
        for name in ("nodes", "accuracy"):
            if options.optional(name) is not None:
                raise OptionError(f"{expression}: tree= says which nodes there are; leave out {name}=")
        return parse_topology(find_method(expression.atom).published_tree(tree))
    if nodes is not None and nodes > MAX_NODES:
        raise OptionError(f"{expression}: nodes is {nodes}: give 1 to {MAX_NODES}")
    accuracy = head_accuracy(options, n_depths, stored) or typical[:n_depths]
    if nodes is not None:
        topology = medusa_tree(accuracy, nodes)
    else:
        curve = environment.curve
        most = max(1, min(63, environment.context.n_batch - 1, environment.n_ctx - 1))
        topology = plan_medusa_tree(accuracy, curve, depth_cost * curve.seconds(1), most=most).topology
    check_leaves(expression, topology.n_leaves)
    return topology


def head_accuracy(options: ExpressionOptions, n_depths: int, stored: Accuracy | None) -> Accuracy | None:
    """Return the accuracies of `accuracy=`, or else those of the head's file; None where nothing was measured."""
    given = options.optional("accuracy")
    if given is not None:
        return read_accuracy_csv(Path(given).expanduser(), n_depths)
    return None if stored is None else stored[:n_depths]


def ranks_by_depth(topology: Topology) -> Sequence[int]:
    """Return how many words are named at each depth: the widest branching there."""
    widest = [0] * topology.max_depth
    for parent, children in topology.children.items():
        depth = 0 if parent == ROOT else topology.depths[parent]
        widest[depth] = max(widest[depth], len(children))
    return widest
