"""Builds `hydra(heads.gguf, ...)`: the heads on the target's device, and the shape of their trees."""

from __future__ import annotations

import dataclasses

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.hydra import HydraDrafter
from specrun.runtime.drafters.path_probability import DynamicShape
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.drafters.tree_options import TreeOptions
from specrun.runtime.heads.hydra_head import HydraHead
from specrun.runtime.planning.medusa_tree import TYPICAL_PATH_ACCURACY, accuracy_by_head, medusa_tree
from specrun.runtime.tree import ROOT

__all__ = ["build_hydra"]

_DEFAULT_NODES = 5  # what a CPU verifies for less than two tokens' time; `nodes=` for more


def build_hydra(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `hydra(heads.gguf, nodes=16)`, `hydra(heads.gguf, tree=4x2)`, `hydra(heads.gguf, depth=4, topk=4)`.

    `nodes` alone asks for the best static tree of that size for the accuracies in the heads' file, or typical ones;
    `depth` or `topk` for a dynamic tree; `n` for a chain.
    """
    options = ExpressionOptions(expression, ["n", "tree", "depth", "topk", "nodes"], 1)
    tree = TreeOptions(
        tree=options.optional("tree"),
        depth=options.optional_integer("depth"),
        topk=options.optional_integer("topk"),
        nodes=options.optional_integer("nodes"),
        n=options.optional_integer("n"),
    )
    context = environment.context
    head = HydraHead(
        file_of(expression, environment),
        environment.target,
        n_cells=context.n_ctx or environment.target.n_ctx_train,
        n_threads=context.n_threads,
    )
    try:
        shape = _shape(tree, head, context.n_batch)
        head.prepare(_ranks(shape))
        return HydraDrafter(head, shape, name=str(expression))
    except BaseException:
        head.close()
        raise


def _shape(tree: TreeOptions, head: HydraHead, n_batch: int) -> Topology | DynamicShape:
    if tree.n is not None and not tree.asks_for_tree:
        if not 1 <= tree.n <= head.n_heads:
            raise OptionError(f"n is {tree.n}: these Hydra heads draft 1 to {head.n_heads} tokens")
        return Topology(tuple(range(ROOT, tree.n - 1)))
    if tree.tree is None and tree.depth is None and tree.topk is None:
        nodes = _DEFAULT_NODES if tree.nodes is None else tree.nodes
        tree = dataclasses.replace(tree, tree="sequoia", nodes=nodes)
    elif tree.tree is None and tree.depth is None:
        most = head.n_heads if tree.nodes is None else max(1, tree.nodes)
        tree = dataclasses.replace(tree, depth=min(head.n_heads, most))
    return tree.shape(n_batch, lambda nodes, depth: _measured_tree(head, nodes, depth))


def _measured_tree(head: HydraHead, nodes: int, depth: int) -> Topology:
    """Return the best tree for the accuracies that stand in the heads' file, or typical ones.

    Medusa's search serves Hydra better than Medusa: its values are products of accuracies given a right path, which is
    what these heads' accuracies are.
    """
    accuracy = accuracy_by_head(head.accuracies, head.n_heads) or [TYPICAL_PATH_ACCURACY] * head.n_heads
    return medusa_tree(accuracy[:depth], nodes)


def _ranks(shape: Topology | DynamicShape) -> list[int]:
    """Return how many words each head has to name: the widest branching of its depth."""
    if isinstance(shape, DynamicShape):
        return [shape.topk] * shape.depth
    widest = [0] * shape.max_depth
    for parent, children in shape.children.items():
        depth = 0 if parent == ROOT else shape.depths[parent]
        widest[depth] = max(widest[depth], len(children))
    return widest
