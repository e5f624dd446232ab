"""Builds `eagle(head.gguf, ...)` and `eagle3(head.gguf, ...)`: the head and the shape of its trees.

Their options are `n`, `tree`, `depth`, `topk`, `nodes` and `accuracy` (see `tree_options`), and
`sampling`, `p_min` and `window`; of `eagle` also `draft_tokens` (see `versions.draft_vocabulary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.eagle.head import PairHead, multiplied_of_pair
from specrun.runtime.drafters.eagle.parallel import build_parallel
from specrun.runtime.drafters.eagle.source import EagleSource
from specrun.runtime.drafters.eagle.versions import (
    ALL,
    MASK_FEATURES,
    Eagle3Head,
    EagleHead,
    draft_vocabulary,
    trained_window,
)
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.states_source import seen_window
from specrun.runtime.drafters.tree_options import Drafts, TreeOptions, head_accuracy, tree_sampling
from specrun.runtime.heads import HeadFile, stored_accuracy
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import (
    MAX_PLANNED_DEPTH,
    best_tree,
    plan_medusa_tree,
    typical_acceptance,
)
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.round.drafter import DrafterWeights
from specrun.runtime.trees import DynamicShape, Topology

# EAGLE-2's trees of 60 nodes are for GPUs: without a size, a round verifies the nodes that pay.
_DEFAULT = TreeOptions(depth=5, topk=2, nodes="auto")


def build_eagle(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `eagle(head.gguf, depth=5, topk=8, nodes=32)`, `n=4` for a chain or `tree=4x2`.

    With `draft_tokens=8192` it drafts so many tokens alone, the most frequent ones.
    """
    options = options_of(expression)
    is_all = options.optional("draft_tokens") == "all"
    most = ALL if is_all else options.optional_integer("draft_tokens")
    drafted = draft_vocabulary(HeadFile(model_file_of(expression, env), "eagle"), env.target, most)
    opened = functools.partial(EagleHead, draft_tokens=most)
    return _build(expression, env, opened, None if drafted is None else len(drafted))


def build_eagle3(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `eagle3(head.gguf, ...)`, with the options of `eagle`; of P-EAGLE those of `dflash`."""
    path = model_file_of(expression, env)
    if MASK_FEATURES not in HeadFile(path, "eagle3"):
        return _build(expression, env, Eagle3Head)
    threads = env.context.n_threads
    opened = functools.partial(
        Eagle3Head, path, env.target, ranks=1, whole_rows=True, n_threads=threads
    )
    return build_parallel(expression, env, opened)


def _build(
    expression: Expression,
    env: DraftEnvironment,
    kind: Callable[..., PairHead],
    n_drafted: int | None = None,
) -> DrafterWeights:
    """Build a head's drafter; `n_drafted` are the tokens it may draft, None: its file's facts."""
    options, tree = options_of(expression), TreeOptions.of(expression)
    if tree.n is None and not tree.asks_for_tree:
        tree = _DEFAULT if env.target.can_branch else TreeOptions(n="auto")
    sampling = tree_sampling(options, "argmax")
    path = model_file_of(expression, env)
    file = HeadFile(path, expression.atom)
    share = multiplied_of_pair(file, env.target, n_drafted) / env.target.n_params
    # Accuracies are of the head's favourite tokens and not of drawn ones.
    measured = sampling == "argmax"
    if options.optional("accuracy") is not None and not (measured and tree.tree == "sequoia"):
        raise OptionError(f"{expression}: accuracy= is only for tree=sequoia, with sampling=argmax")

    def sequoia(nodes: int, depth: int) -> Topology:
        accuracy = None
        if measured:
            accuracy = head_accuracy(options, MAX_PLANNED_DEPTH, stored_accuracy(file))
        if accuracy is None:
            return best_tree(typical_acceptance(sampling), nodes, depth)
        if tree.nodes is not None:
            return medusa_tree(accuracy[:depth], nodes)
        curve = env.curve  # without nodes= it has the size that pays most
        return plan_medusa_tree(accuracy[:depth], curve, share * curve.seconds(1)).topology

    shape = _shape(tree, env, sequoia)
    drafts = Drafts.of(expression, env, tree, shape, sampling)
    # Dynamic trees evaluate more nodes than they keep.
    evaluated = shape.depth * shape.topk if isinstance(shape, DynamicShape) else len(shape)
    ranks, whole_rows = shape.max_width, sampling != "argmax" or env.keeps_rows
    threads = env.context.n_threads
    window = seen_window(options, env, trained_window(file))
    head = kind(path, env.target, ranks=ranks, whole_rows=whole_rows, n_threads=threads)
    n_cells = (window or env.n_ctx) + evaluated + env.keeps_rows  # of a leaf's row

    def start() -> GrowingDrafter:
        return drafts.drafter(EagleSource(head.cells(n_cells), window), share)

    return DrafterWeights(drafts.name, start, [head], drafts.pace)


def _shape(
    tree: TreeOptions, env: DraftEnvironment, plan: Callable[[int, int], Topology]
) -> Topology | DynamicShape:
    n_batch = env.context.n_batch
    if tree.n == "auto" and not tree.asks_for_tree:
        return Topology.chain(env.most_drafted)
    if isinstance(tree.n, int) and not tree.asks_for_tree:
        if not 1 <= tree.n <= n_batch - 1:
            most = f"{n_batch - 1} tokens, as many as a batch holds beside the last one"
            raise OptionError(f"n is {tree.n}: give 1 to {most}")
        return Topology.chain(tree.n)
    return tree.shape(env.context.n_batch, plan, env.most_drafted)
