"""Hydra drafts a tree with heads that read the tokens before their own; and its builder."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.hydra.head import HydraCells, HydraHead
from specrun.runtime.drafters.kept_rows import RowMemory, TreeRows
from specrun.runtime.drafters.path_laws import EvaluatedDepth, PathLaws, Paths, grow_draft
from specrun.runtime.drafters.states_drafter import StatesDrafter
from specrun.runtime.drafters.tree_options import TreeOptions, head_tree, ranks_by_depth
from specrun.runtime.heads.graph_trees import GraphTrees
from specrun.runtime.heads.graphs import MOST_CHAIN_ROWS, ChainTokens
from specrun.runtime.heads.states import FloatRows, RowPiece, TextRows
from specrun.runtime.heads.tree_graphs import NamedChildren, TreePlan
from specrun.runtime.language import Expression, ExpressionOptions, options_of
from specrun.runtime.planning import TYPICAL_PATH_ACCURACY, DraftPlan
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import DynamicShape, Topology
from specrun.runtime.trees.growth import draft_chain
from specrun.runtime.trees.tree import ROOT, DraftTree, TreeBuilder

# == The drafter ===================================================================================
#
# The tree is verified as point masses, so the text is plain decoding's own. As a head's law depends
# on the path, it is evaluated for every path of a depth at once; static trees take its best tokens
# by rank, dynamic ones those of highest path probability. All of it is one evaluation, where the
# heads have a graph for that.
#
# The heads read a state of the position before the last committed token. Without a prefix layer it
# is the target's own hidden state there. With one (Hydra++) it is the layer's output, for which the
# layer has to have seen the states of all positions before: they are cached as the text is
# committed, and no drafts among them.


class HydraState(TextRows[FloatRows]):
    """The positions of a text are rows of the target's hidden states.

    What the heads say after them is the state [hidden] that they read. Without a prefix layer no
    row lies in a cell anywhere, there is room for all, and only the last one is read.
    """

    def __init__(self, heads: HydraCells) -> None:
        # Without a prefix layer nothing lies in cells, so nothing limits the text.
        n_cells = sys.maxsize if heads.prefix is None else heads.prefix.n_cells
        super().__init__(self._evaluate_states, n_cells, ahead=0)
        self._heads, self.reads_all = heads, heads.prefix is not None

    def chain(
        self, tokens: Sequence[int], n: int, *, probabilities: bool = False
    ) -> ChainTokens | None:
        """Return n tokens of a greedy chain after the last token of a text, evaluated at once.

        None where the state before it is not known, or the heads have no graph for it.
        """
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        drafted = self._heads.chain(piece, tokens[-1], n, probabilities=probabilities)
        if drafted is not None:
            self.settle(piece)
        return drafted

    def tree(self, tokens: Sequence[int], plan: TreePlan) -> NamedChildren | None:
        """Return what a plan's tree names after the last token of a text, evaluated at once.

        None where `chain` returns it.
        """
        piece = self.due(tokens, MOST_CHAIN_ROWS)
        if piece is None:
            return None
        named = self._heads.tree(plan, piece, tokens[-1])
        if named is not None:
            self.settle(piece)
        return named

    def _evaluate_states(self, piece: RowPiece) -> FloatRows:
        state: FloatRows = self._heads.states(piece.rows, piece.position, piece.count)[-1]
        return state


class HydraNodes:
    """What of a tree the heads were asked about, for rules that read its leaves.

    (`EvaluatedNodes`.) Below the last head nothing is known.
    """

    def __init__(self, heads: HydraCells, state: FloatRows, last: int) -> None:
        self._heads, self._state, self._last = heads, state, last
        self._places: dict[tuple[int, int], int] = {}
        self.paths: list[list[int]] = []

    def add(self, parents: Sequence[int], tokens: Sequence[int]) -> int:
        """Note nodes of one depth; return the number of the first."""
        first = len(self.paths)
        for parent, token in zip(parents, tokens, strict=True):
            self._places.setdefault((parent, token), len(self.paths))
            self.paths.append([*(self.paths[parent] if parent != ROOT else [self._last]), token])
        return first

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the node of a token below another, None if none is."""
        return self._places.get((parent, token))

    def leaf(self, parent: int, token: int) -> tuple[int, FloatRows] | None:
        """Ask the next head about a token below a node."""
        first = self.add([parent], [token])
        if len(self.paths[first]) > self._heads.n_prepared:
            return None
        return first, self._heads.rows(self._state, self.paths[first:])[1][0]

    def root(self) -> FloatRows | None:
        """Ask the first head."""
        return self._heads.rows(self._state, [[self._last]])[1][0]


class HydraDrafter(StatesDrafter):
    """Grows a tree below the target's own token, from the hidden state that it came from.

    With `length` the shape is a chain, and as long as it pays; with `size` it is dynamic, and as
    large as it pays.
    """

    needs_hidden_states = True

    def __init__(
        self,
        cells: HydraCells,
        shape: Topology | DynamicShape,
        *,
        length: DraftPlan | None = None,
        size: DraftPlan | None = None,
        name: str = "hydra",
    ) -> None:
        self._state = HydraState(cells)
        super().__init__(name, self._state, cells, cells.n_params, length, size)
        self.max_nodes = shape.max_nodes
        self.max_leaves = shape.max_leaves
        self._heads, self._shape, self._trees = cells, shape, GraphTrees(shape)
        self.keeps_rows = cells.whole_rows
        self._row_memory = RowMemory()

    @property
    def depth_params(self) -> float:
        """The head's, and the output matrix that it reads."""
        return self._heads.depth_params

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a tree; none where the hidden state before the last token is not known."""
        if request.keep in ("nothing", "points") or not self.keeps_rows:
            return self._drafted_tree(request)
        return self._tree_with_rows(request)

    def _tree_with_rows(self, request: DraftRequest) -> DraftTree:
        """Return a tree that tells the heads' rows: every depth is an evaluation of its own."""
        last = request.tokens[-1]
        state = self._state.said(request.tokens)
        if state is None:
            return DraftTree()
        nodes = HydraNodes(self._heads, state, last)
        rows = TreeRows(self._row_memory, nodes, copies=True)

        def below(parents: Sequence[int], tokens: Sequence[int], _paths: Paths) -> EvaluatedDepth:
            first = nodes.add(parents, tokens)
            laws, whole = self._heads.rows(state, nodes.paths[first:])
            rows.take(first, whole)
            return laws

        def root() -> EvaluatedDepth:
            laws, whole = self._heads.rows(state, [[last]])
            rows.take(ROOT, whole)
            return laws

        laws = PathLaws(root, below, request, request.params)
        if request.max_depth < 1 or request.max_nodes < 1:
            return rows.of(DraftTree())
        shape, length = self._shape.limited(request.max_depth, request.max_nodes), self._length
        if length is not None:
            length.start(points=request.keep == "nothing")
            most = min(shape.max_nodes, request.max_depth, request.max_nodes)
            chain = draft_chain(
                laws.after, request.noise, len(request.tokens), most=most, points=True, stop=length
            )
            return rows.of(self.stopped(chain))
        depth = None
        if self._size is not None:
            request, depth = self.within_what_pays(request, self._size)
        if depth == 0:
            return rows.of(DraftTree())
        return rows.of(grow_draft(shape, laws, request, size=self._size))

    def _drafted_tree(self, request: DraftRequest) -> DraftTree:
        shape, length = self._shape, self._length
        if self.max_nodes > min(request.max_depth, request.max_nodes):  # it is no deeper
            if request.max_depth < 1 or request.max_nodes < 1:
                return DraftTree()
            shape = shape.limited(request.max_depth, request.max_nodes)
        if length is not None:
            return self._stopped_chain(request, length, shape.max_nodes)
        depth = None
        if self._size is not None:
            request, depth = self.within_what_pays(request, self._size)
        if depth == 0:
            return DraftTree()
        if isinstance(shape, Topology) and shape.n_leaves == 1:
            chain = self._state.chain(request.tokens, len(shape.parents))
            if chain is not None:
                return DraftTree.chain(chain.tokens)
        else:
            named = self._state.tree(request.tokens, self._trees.plan_of(depth))
            if named is not None:
                return self._trees.drafted(named, request.max_depth, request.max_nodes, self._size)
        state = self._state.said(request.tokens)
        if state is None:
            return DraftTree()
        if isinstance(shape, DynamicShape):
            laws = _laws(self._heads, state, request)
            return grow_draft(shape, laws, request, size=self._size)
        # Static trees need tokens alone, so the graph leaves out the probabilities.
        return _grow_by_rank(shape, self._heads, state, request.tokens[-1])

    def _stopped_chain(self, request: DraftRequest, length: DraftPlan, most: int) -> DraftTree:
        """Return a chain as long as it pays, by the heads' probabilities."""
        most = min(most, length.depth_to_ask())
        if most < 1:
            return DraftTree()
        chain = self._state.chain(request.tokens, most, probabilities=True)
        if chain is not None and chain.log_probs is not None:
            return self.stopped(self.shortened(chain.tokens, chain.log_probs, length))
        state = self._state.said(request.tokens)
        if state is None:
            return DraftTree()
        length.start(points=request.keep == "nothing")
        after, start = _laws(self._heads, state, request).after, len(request.tokens)
        return self.stopped(
            draft_chain(after, request.noise, start, most=most, points=True, stop=length)
        )

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, hidden] of the hidden states."""
        return rows.hidden_states(wanted)


def _grow_by_rank(topology: Topology, heads: HydraCells, state: FloatRows, last: int) -> DraftTree:
    """Return a tree of this shape: children are the best tokens after a node's path, by rank."""
    children, tokens = topology.children, dict[int, int]()  # by their places in the topology
    level = [(ROOT, [last])]  # (place, path) of what is evaluated next
    while level:
        # All paths of a depth in one evaluation: the heads' weights are read once for them.
        named = heads.best_tokens(state, [path for _, path in level]).tolist()
        below: list[tuple[int, list[int]]] = []
        for (place, path), best in zip(level, named, strict=True):
            for child, token in zip(children[place], best, strict=False):
                tokens[child] = token
                # Leaves are not evaluated further: nobody asks what follows them.
                if child in children:
                    below.append((child, [*path, token]))
        level = below
    if len(tokens) == len(topology):
        return DraftTree.of_points([tokens[i] for i in range(len(topology))], topology.parents)
    # The vocabulary has fewer tokens than the tree has branches.
    builder, nodes = TreeBuilder(), {ROOT: ROOT}
    for place in sorted(tokens):
        nodes[place] = builder.add(nodes[topology.parents[place]], tokens[place])
    return builder.build()


def _laws(heads: HydraCells, state: FloatRows, request: DraftRequest) -> PathLaws:
    """Return the heads as a source of laws: head k's is the law of the token at depth k + 1."""
    last = request.tokens[-1]

    def below(_parents: Sequence[int], _tokens: Sequence[int], paths: Paths) -> EvaluatedDepth:
        return heads.best_laws(state, [[last, *path] for path in paths()])

    return PathLaws(lambda: heads.best_laws(state, [[last]]), below, request, request.params)


# == The builder of `hydra(heads.gguf, ...)` =======================================================


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
            length=env.draft_plan(share) if tree.n == "auto" else None,
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
