"""Builds `medusa(heads.gguf, ...)`: the heads, shared, and the tree of their tokens."""

from __future__ import annotations

from specrun.runtime.drafters.drafter import DrafterWeights
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.head_tree import head_tree, ranks_by_depth
from specrun.runtime.drafters.medusa import MedusaDrafter
from specrun.runtime.heads.medusa_head import MedusaHead
from specrun.runtime.methods import options_of

__all__ = ["build_medusa"]


def build_medusa(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `medusa(heads.gguf, tree=4x2)`, `medusa(heads.gguf, nodes=16, accuracy=FILE.csv)` or without options."""
    options = options_of(expression)
    path = file_of(expression, environment)
    head = MedusaHead(path, environment.target, n_threads=environment.context.n_threads)
    try:
        topology = head_tree(
            expression,
            options,
            environment,
            stored=head.accuracy,
            n_depths=head.n_heads,
            depth_cost=head.evaluated_params / head.n_heads / environment.target.n_params,
        )
        head.prepare(ranks_by_depth(topology))
    except BaseException:
        head.close()
        raise
    name = str(expression)
    return DrafterWeights(name, lambda: MedusaDrafter(head, topology, name=name), [head])
