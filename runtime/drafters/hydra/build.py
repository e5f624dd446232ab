"""Builds `hydra(heads.gguf, ...)`: the heads, shared, and the shape of their trees."""

from __future__ import annotations

import dataclasses

from specrun.bindings.errors import OptionError
from specrun.runtime.costs import TYPICAL_PATH_ACCURACY
from specrun.runtime.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.hydra.drafter import HydraDrafter
from specrun.runtime.drafters.hydra.hydra_head import HydraHead
from specrun.runtime.drafters.tree_options import TreeOptions, head_tree, ranks_by_depth
from specrun.runtime.language import Expression, ExpressionOptions
from specrun.runtime.methods import options_of
from specrun.runtime.trees import DynamicShape, Topology


def build_hydra(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `hydra(heads.gguf, nodes=16)`, with `tree=4x2`, or with `depth=4, topk=4`.

    Static trees are asked for as Medusa's (`head_tree`); `depth` or `topk` ask for a dynamic one,
    `n` for a chain.
    """
    options = options_of(expression)
    path = model_file_of(expression, env)
    whole_rows = env.keeps_rows
    head = HydraHead(path, env.target, whole_rows=whole_rows, n_threads=env.context.n_threads)
    try:
        shape = _shape(expression, options, env, head)
        if isinstance(shape, DynamicShape):
            ranks = [shape.topk] * shape.depth
        else:
            ranks = list(ranks_by_depth(shape))
        if env.keeps_rows and len(ranks) < head.n_heads:
            ranks.append(1)  # of the token after a whole draft
        head.prepare(ranks)
    except BaseException:
        head.close()
        raise
    name, n_cells = str(expression), env.n_ctx
    tree, share = TreeOptions.of(expression), _depth_cost(head, env)

    def start() -> HydraDrafter:
        return HydraDrafter(
            head.cells(n_cells),
            shape,
            length=env.draft_length(share) if tree.n == "auto" else None,
            size=tree.size(shape, env, share),
            name=name,
        )

    pace = env.pace_of(chooses="auto" in (tree.n, tree.nodes))
    return DrafterWeights(name, start, [head], pace)


def _depth_cost(head: HydraHead, env: DraftEnvironment) -> float:
    """Return what a depth reads of the heads' weights over the target's."""
    return head.evaluated_params / head.n_heads / env.target.n_params


def _shape(
    expression: Expression,
    options: ExpressionOptions,
    env: DraftEnvironment,
    head: HydraHead,
) -> Topology | DynamicShape:
    tree = TreeOptions.of(expression)
    if tree.n == "auto" and not tree.asks_for_tree:
        return Topology.chain(min(head.n_heads, env.most_drafted))
    if isinstance(tree.n, int) and not tree.asks_for_tree:
        if not 1 <= tree.n <= head.n_heads:
            raise OptionError(f"n is {tree.n}: these Hydra heads draft 1 to {head.n_heads} tokens")
        return Topology.chain(tree.n)
    if tree.n is tree.depth is tree.topk is None and tree.nodes != "auto":
        return head_tree(
            expression,
            options,
            env,
            stored=head.accuracy,
            n_depths=head.n_heads,
            depth_cost=_depth_cost(head, env),
            typical=(TYPICAL_PATH_ACCURACY,) * head.n_heads,
        )
    if options.optional("accuracy") is not None:
        problem = "accuracy= is what static trees are made from; leave it out, or depth= and topk="
        raise OptionError(f"{expression}: {problem}")
    if tree.depth is None:
        nodes = env.most_drafted if tree.nodes == "auto" else tree.nodes
        most = head.n_heads if nodes is None else max(1, nodes)
        tree = dataclasses.replace(tree, depth=min(head.n_heads, most))
    return tree.shape(env.context.n_batch, lambda nodes, depth: Topology(()), env.most_drafted)
