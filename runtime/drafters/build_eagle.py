"""Builds `eagle(head.gguf, ...)` and `eagle3(head.gguf, ...)`: the head on the target's device, and its trees' shape."""

from __future__ import annotations

from specrun.bindings.context import MAX_SEQUENCES
from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.drafter import Drafter
from specrun.runtime.drafters.eagle import EagleDrafter
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.expression import Expression
from specrun.runtime.drafters.expression_options import ExpressionOptions
from specrun.runtime.drafters.path_probability import DynamicShape
from specrun.runtime.drafters.proposals import TreeSampling
from specrun.runtime.drafters.topology import Topology
from specrun.runtime.drafters.tree_options import TreeOptions
from specrun.runtime.heads.eagle3_head import Eagle3Head
from specrun.runtime.heads.eagle_head import EagleHead
from specrun.runtime.planning.sequoia import best_tree, typical_acceptance
from specrun.runtime.tree import ROOT

__all__ = ["build_eagle", "build_eagle3"]

# EAGLE-2's trees of 60 nodes are for GPUs: a CPU verifies this many for less than two tokens' time.
_DEFAULT = DynamicShape(depth=5, topk=2, nodes=6)
_RANKED_WORDS = 40


def build_eagle(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `eagle(head.gguf, depth=5, topk=8, nodes=32)`, `eagle(head.gguf, n=4)` or `eagle(head.gguf, tree=4x2)`."""
    return _build(expression, environment, EagleHead)


def build_eagle3(expression: Expression, environment: DraftEnvironment, build: BuildPart) -> Drafter:
    """Build `eagle3(head.gguf, ...)`, with the options of `eagle`."""
    return _build(expression, environment, Eagle3Head)


def _build(expression: Expression, environment: DraftEnvironment, kind: type[EagleHead | Eagle3Head]) -> Drafter:
    options = ExpressionOptions(expression, ["n", "sampling", "tree", "depth", "topk", "nodes"], 1)
    tree = TreeOptions(
        tree=options.optional("tree"),
        depth=options.optional_integer("depth"),
        topk=options.optional_integer("topk"),
        nodes=options.optional_integer("nodes"),
        n=options.optional_integer("n"),
    )
    shape = _shape(tree, environment.context.n_batch)
    schemes: dict[str, TreeSampling] = {"with": "with", "without": "without", "argmax": "argmax"}
    sampling = schemes[options.choice("sampling", list(schemes), "argmax")]
    leaves = shape.max_leaves if isinstance(shape, DynamicShape) else shape.n_leaves
    if leaves > MAX_SEQUENCES:
        raise OptionError(f"{expression}: {leaves} leaves need as many sequences, and llama.cpp allows {MAX_SEQUENCES}")
    # Dynamic trees evaluate more nodes than they keep.
    evaluated = shape.depth * shape.topk if isinstance(shape, DynamicShape) else len(shape)
    widest = shape.topk if isinstance(shape, DynamicShape) else shape.max_width
    head = kind(
        file_of(expression, environment),
        environment.target,
        n_cells=(environment.context.n_ctx or environment.target.n_ctx_train) + evaluated,
        ranks=max(widest, _RANKED_WORDS),
        whole_rows=sampling != "argmax",
        n_threads=environment.context.n_threads,
    )
    try:
        return EagleDrafter(head, shape, sampling=sampling, name=str(expression))
    except BaseException:
        head.close()
        raise


def _shape(tree: TreeOptions, n_batch: int) -> Topology | DynamicShape:
    if tree.n is not None and not tree.asks_for_tree:
        if not 1 <= tree.n <= n_batch - 1:
            raise OptionError(
                f"n is {tree.n}: give 1 to {n_batch - 1} tokens, as many as a batch holds beside the last one"
            )
        return Topology(tuple(range(ROOT, tree.n - 1)))
    if not tree.asks_for_tree:
        return _DEFAULT
    return tree.shape(n_batch, lambda nodes, depth: best_tree(typical_acceptance("argmax"), nodes, depth))
