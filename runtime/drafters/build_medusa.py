"""Builds `medusa(heads.gguf, ...)`: the heads on the target's device, and the tree of their words."""

from __future__ import annotations

from specrun.bindings.context import MAX_SEQUENCES
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.medusa import MedusaDrafter
from specrun.runtime.drafters.topology import Topology, parse_topology
from specrun.runtime.heads.medusa_head import MedusaHead
from specrun.runtime.planning.medusa_tree import TYPICAL_ACCURACY, accuracy_by_head, medusa_tree
from specrun.runtime.tree import ROOT

__all__ = ["build_medusa"]

_DEFAULT_NODES = 5  # what a CPU verifies for less than two tokens' time; `nodes=` for more


def build_medusa(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `medusa(heads.gguf, tree=4x2, nodes=16)`."""
    options = ExpressionOptions(expression, ["tree", "nodes"], 1)
    tree, nodes = options.optional("tree"), options.optional_integer("nodes")
    if tree is not None and nodes is not None:
        raise OptionError(f"{expression}: tree= says how many nodes there are; leave out nodes=")
    path = file_of(expression, environment)
    head = MedusaHead(path, environment.target, n_threads=environment.context.n_threads)
    try:
        topology = (
            parse_topology(tree)
            if tree is not None
            else _measured_tree(head, _DEFAULT_NODES if nodes is None else nodes)
        )
        if topology.n_leaves > MAX_SEQUENCES:
            raise OptionError(
                f"{expression}: a tree of {topology.n_leaves} leaves needs as many sequences, and llama.cpp allows "
                f"{MAX_SEQUENCES}: make it narrower"
            )
        head.prepare(_ranks(topology))
        return MedusaDrafter(head, topology, name=str(expression))
    except BaseException:
        head.close()
        raise


def _measured_tree(head: MedusaHead, nodes: int) -> Topology:
    """Return the best tree for the accuracies that stand in the head's file, or typical ones."""
    accuracy = accuracy_by_head(head.accuracies, head.n_heads) or TYPICAL_ACCURACY
    return medusa_tree(accuracy[: head.n_heads], nodes)


def _ranks(topology: Topology) -> list[int]:
    """Return how many words each head has to name: the widest branching of its depth."""
    widest = [0] * topology.max_depth
    for parent, children in topology.children.items():
        depth = 0 if parent == ROOT else topology.depths[parent]
        widest[depth] = max(widest[depth], len(children))
    return widest
