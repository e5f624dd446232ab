"""Hydra drafts a tree with heads that read the tokens before their own; and its builder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.source import NodeRows
from specrun.runtime.drafters.hydra.head import HydraCells, HydraHead
from specrun.runtime.drafters.states_source import StatesSource
from specrun.runtime.drafters.tree_options import Drafts, TreeOptions, head_tree, ranks_by_depth
from specrun.runtime.heads.states import FloatRows, TextRows
from specrun.runtime.language import Expression, ExpressionOptions, options_of
from specrun.runtime.planning import TYPICAL_PATH_ACCURACY
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest
from specrun.runtime.trees import DynamicShape, Topology

# == The source of rows ============================================================================
#
# The tree is verified as point masses, so the text is plain decoding's own. As a head's
# distribution depends on the path, it is evaluated for every path of a depth at once; static trees
# take its best tokens by rank, dynamic ones those of highest path probability. All of it is one
# evaluation, if the heads have a graph for that.
#
# The heads read a state of the position before the last committed token. Without a prefix layer it
# is the target's own hidden state there. With one (Hydra++) it is the layer's output, for which the
# layer has to have seen the states of all positions before: they are cached as the text is
# committed, and no drafts among them.


class HydraSource(StatesSource[TextRows[FloatRows]]):
    """Hydra's heads below the target's own token, from the hidden state that it came from.

    The positions of a text are rows of the target's hidden states; the result after them is the
    state [hidden] that the heads read. Without a prefix layer no row lies in a cell anywhere, there
    is room for all, and only the last one is read.
    """

    names_trees = True

    def __init__(self, cells: HydraCells) -> None:
        head, prefix = cells.head, cells.prefix
        state = TextRows[FloatRows](
            lambda piece: cells.states(piece.rows, piece.position, piece.count)[-1],
            sys.maxsize if prefix is None else prefix.n_cells,
            ahead=0,
            reads_all=prefix is not None,
        )
        super().__init__(state, cells, head.n_params, head.depth_params)
        self._cells, self.keeps_rows = cells, head.whole_rows
        self._read_state: FloatRows | None = None
        self._whole = False
        self._paths: list[list[int]] = []  # of the root and the nodes, from the last token on

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the first head; None if the state before the last token is unknown."""
        self._read_state = self.state.said(request.tokens)
        self._whole = self.keeps_rows and request.keep not in ("nothing", "points")
        self._paths = [[request.tokens[-1]]]
        return None if self._read_state is None else self._rows(self._paths)

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Evaluate the head of a depth for all paths; None below the last head."""
        above = [self._paths[parent + 1] for parent in parents]
        paths = [[*path, token] for path, token in zip(above, tokens, strict=True)]
        self._paths += paths
        return self._rows(paths) if len(paths[0]) <= len(self._cells.head.ranks) else None

    def _rows(self, paths: Sequence[Sequence[int]]) -> NodeRows:
        assert self._read_state is not None
        if not self._whole:
            return NodeRows(ranked=self._cells.best_laws(self._read_state, paths))
        ranked, whole = self._cells.rows(self._read_state, paths)
        return NodeRows(whole, ranked)


# == The builder of `hydra(heads.gguf, ...)` =======================================================


def build_hydra(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `hydra(heads.gguf, nodes=16)`, with `tree=4x2`, or with `depth=4, topk=4`.

    Static trees are built as Medusa's (`head_tree`); `depth` or `topk` set a dynamic one,
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
        tree = TreeOptions.of(expression)
        drafts, share = Drafts.of(expression, env, tree, shape), _depth_cost(head, env)
    except BaseException:
        head.close()
        raise

    def start() -> GrowingDrafter:
        return drafts.drafter(HydraSource(head.cells(env.n_ctx)), share)

    is_bare = tree.n is None and not tree.asks_for_tree  # its tree is planned by costs
    pace = env.pace_of(chooses=is_bare or drafts.is_planned)
    return DrafterWeights(drafts.name, start, [head], pace)


def _depth_cost(head: HydraHead, env: DraftEnvironment) -> float:
    """Return the bytes that a depth reads of the heads' weights over the target's."""
    return head.depth_params / env.target.n_params


def _shape(
    expression: Expression,
    options: ExpressionOptions,
    env: DraftEnvironment,
    head: HydraHead,
) -> Topology | DynamicShape:
    tree = TreeOptions.of(expression)
    if not tree.asks_for_tree and (tree.n == "auto" or (not env.target.can_branch and not tree.n)):
        return Topology.chain(min(head.n_heads, env.most_drafted))
    if isinstance(tree.n, int) and not tree.asks_for_tree:
        if not 1 <= tree.n <= head.n_heads:
            raise OptionError(f"n is {tree.n}: these Hydra heads draft 1 to {head.n_heads} tokens")
        return Topology.chain(tree.n)
    if tree.n is tree.depth is tree.topk is None and tree.nodes != "auto":
        return head_tree(
            expression,
            env,
            stored=head.accuracy,
            n_depths=head.n_heads,
            depth_cost=_depth_cost(head, env),
            typical=(TYPICAL_PATH_ACCURACY,) * head.n_heads,
        )
    if options.optional("accuracy") is not None:
        problem = "accuracy= is for static trees only; leave it out, or depth= and topk="
        raise OptionError(f"{expression}: {problem}")
    if tree.depth is None:
        nodes = env.most_drafted if tree.nodes == "auto" else tree.nodes
        most = head.n_heads if nodes is None else max(1, nodes)
        tree = dataclasses.replace(tree, depth=min(head.n_heads, most))
    return tree.shape(env.context.n_batch, lambda nodes, depth: Topology(()), env.most_drafted)
