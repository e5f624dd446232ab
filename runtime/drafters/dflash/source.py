"""Drafts of block drafters: chains and trees over one evaluated block, and their builder.

The features of the committed text are put into cells once, before the first block behind them. A
block's own cells lie behind these and are dropped before the next evaluation. So `TextRows` holds
all facts of a text, and an interrupt or a failed evaluation leaves it as it was.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specrun.bindings.contexts import FEATURES_AT_ONCE
from specrun.bindings.errors import ClosedError, OptionError
from specrun.runtime.drafters.batching import ContextPart
from specrun.runtime.drafters.dflash.drafter import BlockCells, BlockDrafter
from specrun.runtime.drafters.dflash.file import Blocks
from specrun.runtime.drafters.dflash.rows import BlockRows
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter, check_p_min
from specrun.runtime.drafters.growing.source import Asked, NodeRows
from specrun.runtime.drafters.states_source import Cells, StatesSource, seen_window
from specrun.runtime.drafters.tree_options import TreeOptions, tree_sampling
from specrun.runtime.heads import TextRows
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.transform import Logits
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.planning import best_tree, typical_acceptance
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest, Owned
from specrun.runtime.trees import DynamicShape, Topology, TreeSampling, check_sampling

# == The source of rows ============================================================================


class SlotState(TextRows[Any]):
    """A text's rows of a drafter of blocks, in `cells`; a block predicts at most `n_slots` tokens.

    `part` are its cells if they are a part of a context of several conversations.
    """

    cells: Cells
    n_slots: int
    part: ContextPart | None = None

    @abstractmethod
    def block(self, tokens: Sequence[int], n_slots: int) -> BlockRows | None:
        """Put waiting rows into cells; return the rows of a text's block, None if unknown."""

    def ask(self, tokens: Sequence[int], n_slots: int) -> None:
        """Have the block evaluated with those of other conversations."""
        raise NotImplementedError

    def answer(self) -> BlockRows | None:
        """Return the rows of the requested block; None before it was evaluated."""
        raise NotImplementedError


class BlockState(SlotState):
    """The positions of a text are rows of the target's features, put into the drafter's cells."""

    def __init__(self, cells: BlockCells, window: int = 0) -> None:
        super().__init__(
            *(cells.put, cells.n_cells),
            ahead=0,
            chunk=FEATURES_AT_ONCE,
            window=window,
            drop=cells.drop,
        )
        self.cells = self._cells = cells
        self.n_slots, self.part = cells.n_slots, cells.part

    def block(self, tokens: Sequence[int], n_slots: int) -> BlockRows | None:
        """Put waiting rows into cells; return the rows of a text's block, None if unknown."""
        if self.said(tokens) is None:
            return None
        return self._cells.block(tokens[-1], len(tokens) - 1, n_slots)

    def ask(self, tokens: Sequence[int], n_slots: int) -> None:
        """Have the block evaluated with those of other conversations."""
        self._cells.ask(tokens[-1], len(tokens) - 1, n_slots)

    def answer(self) -> BlockRows | None:
        """Return the rows of the requested block; None before it was evaluated."""
        return self._cells.answer()


_FAR = np.float32(30.0)  # logits below the least one that a drafter names


class BlockSource(StatesSource[SlotState]):
    """A block drafter in one conversation: rows of all nodes come from one evaluation."""

    def __init__(
        self,
        blocks: Blocks,
        state: SlotState,
        *,
        chooses: bool = False,
        keeps_rows: bool = False,
    ) -> None:
        super().__init__(state, state.cells, blocks.n_params, blocks.multiplied, blocks.taps)
        self._most_slots = self._n_slots = state.n_slots
        self._keeps_leaf, self._chooses = keeps_rows, chooses
        # Rows that a rule reads would be overwritten by the blocks of others.
        self.shared = None if keeps_rows else state.part
        self.few_tokens = blocks.few_tokens
        self._last = 0
        self._points = self._whole = self._under_grammar = False
        self._rows: BlockRows | None = None
        self._found: NodeRows | None = None  # of a request that needed no evaluation
        self._depths = [0]  # of the root and the nodes

    def expect(self, depth: int) -> None:
        """Predict so many tokens, and the one after a whole draft if a rule reads its row."""
        self._n_slots = max(1, min(depth + self._keeps_leaf, self._most_slots))

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Evaluate the block; None if the state before the last token is unknown."""
        self._depths = [0]
        self._rows = self.state.block(request.tokens, self._n_slots)
        self._note(request)
        return None if self._rows is None else self._after(0, request.tokens[-1:])

    def _note(self, request: DraftRequest) -> None:
        """Note whether tokens are chosen, and whether something reads whole rows."""
        params = request.params
        self._points = self._chooses or params.is_greedy
        # Penalties, biases and grammars name tokens, and see the path of a node.
        self._under_grammar = request.state.grammar is not None
        names = params.has_penalties or params.logit_bias or self._under_grammar
        self._whole = bool(names) or self._keeps_leaf

    def _after(
        self, slot: int, tokens: Sequence[int], parents: Sequence[int] | None = None
    ) -> NodeRows:
        block = self._rows  # read once: another thread may close it
        if block is None:
            raise ClosedError("the context is closed")
        points = self._points and not self._whole
        rows = block.after(slot, tokens, points=points, parents=parents)
        if self._under_grammar and self.few_tokens:
            return rows  # it names few tokens, and nothing follows any other
        if self._whole:
            rows.highest = None
        if self._under_grammar and rows.whole is not None:
            rows.whole = [_floored(row) for row in rows.whole]
        return rows

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Return the rows of the next slot after nodes of one depth; None below the last slot."""
        depth = self._depths[parents[0] + 1] + 1
        self._depths += [depth] * len(tokens)
        return self._after(depth, tokens, parents) if depth < self._n_slots else None

    # -- evaluations with other conversations ------------------------------------------------------

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Have the block evaluated with others'; all rows below are known then."""
        assert isinstance(asked, tuple)
        parents, tokens = asked
        if tokens:
            self._found = self.below(parents, tokens)
            return True
        text = request.tokens
        if self.state.said(text) is None:
            return False
        self._depths, self._found, self._last = [0], None, text[-1]
        self._note(request)
        self.state.ask(text, self._n_slots)
        return True

    def result(self) -> NodeRows | None:
        """Return the rows of the request; None before the block was evaluated."""
        found, self._found = self._found, None
        if found is None and (rows := self.state.answer()) is not None:
            self._rows = rows
            found = self._after(0, [self._last])
        return found

    def close(self) -> None:
        """Free the cells, once no row of a block is held any more."""
        self._rows = self._found = None
        super().close()


def _floored(row: Logits) -> Logits:
    """Return a row without minus infinity: a grammar may allow only tokens that have it."""
    finite = np.isfinite(row)
    return row if finite.all() else np.where(finite, row, row[finite].min() - _FAR)


# == The builder of `dflash(FILE, ...)` ============================================================


_TOPK = 3


def build_dflash(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `dflash(FILE, depth=15, topk=3, nodes=auto)`, `n=4` for a chain, or `tree=4x2`.

    Without a size a round verifies the part of the block that pays; of a target that cannot branch,
    a chain.
    """
    path = model_file_of(expression, env)
    options, threads = options_of(expression), env.context.n_threads
    layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
    drafter = BlockDrafter(
        path, env.target, n_gpu_layers=layers, use_mmap=env.use_mmap, n_threads=threads
    )
    try:
        drafter.file.check_threshold(options.number("p_min", 0.0))
        window = seen_window(options, env, drafter.file.window)
        context = dataclasses.replace(env.context, n_ctx=window or env.n_ctx)

        def start(n_slots: int) -> BlockState:
            return BlockState(drafter.cells(context, n_slots, env.meeting), window)

        return build_blocks(expression, env, drafter, drafter.blocks, start)
    except BaseException:
        drafter.close()
        raise


def build_blocks(
    expression: Expression,
    env: DraftEnvironment,
    drafter: Owned,
    blocks: Blocks,
    started: Callable[[int], SlotState],
) -> DrafterWeights:
    """Build a drafter of blocks by an expression's options.

    `started` makes a conversation's state, for blocks that predict so many tokens.
    """
    options, tree = options_of(expression), TreeOptions.of(expression)
    sampling, p_min = tree_sampling(options, "argmax"), options.number("p_min", 0.0)
    check_p_min(p_min)
    shape = _shape(expression, tree, sampling, env, blocks)
    check_sampling(shape, sampling)
    depth = shape.max_depth
    # Rules that weigh distributions read one more, after a whole draft.
    n_slots = min(depth + env.keeps_rows, blocks.n_slots)
    chooses = tree.nodes == "auto" or not (tree.asks_for_tree or isinstance(tree.n, int))
    name, rounds = str(expression), _rounds(blocks, env)
    # Drawn tokens come one after the other, from a block that is evaluated as a whole.
    planned = depth if isinstance(shape, DynamicShape) else 1

    def start() -> GrowingDrafter:
        chosen, state = sampling == "argmax", started(n_slots)
        source = BlockSource(blocks, state, chooses=chosen, keeps_rows=env.keeps_rows)
        cost = rounds if planned > 1 else lambda _: rounds(n_slots)
        plan = env.draft_plan(0.0, depth=planned, rounds=cost) if chooses else None
        return GrowingDrafter(source, shape, sampling=sampling, p_min=p_min, plan=plan, name=name)

    pace = env.pace_of(chooses=chooses, draws=sampling != "argmax")
    return DrafterWeights(name, start, [drafter], pace)


def _rounds(blocks: Blocks, env: DraftEnvironment) -> Callable[[int], float]:
    """Return the cost of blocks of n slots in plain rounds of the target, whose curve they follow.

    It is the time of an evaluation of as many tokens by a model of the drafter's size.
    """
    share, curve, first = (
        blocks.multiplied / max(1, env.target.n_params),
        env.known,
        blocks.first,
    )
    return lambda n: share * curve.seconds(first + n) / curve.seconds(1)


def _completed(tree: TreeOptions, slots: int, largest: int) -> TreeOptions:
    """Return the options of a tree with depth, width and size if they were left out."""
    if tree.tree not in (None, "sequoia"):
        return tree
    if tree.depth is None:
        most = tree.nodes if isinstance(tree.nodes, int) else largest
        tree = dataclasses.replace(tree, depth=max(1, min(slots, largest, most)))
    if tree.tree is None:
        tree = dataclasses.replace(tree, topk=_TOPK if tree.topk is None else tree.topk)
        nodes = max(largest, tree.depth or 1) if tree.nodes is None else tree.nodes
        tree = dataclasses.replace(tree, nodes=nodes)
    return tree


def _shape(
    expression: Expression,
    tree: TreeOptions,
    sampling: TreeSampling,
    env: DraftEnvironment,
    blocks: Blocks,
) -> Topology | DynamicShape:
    """Return the shape of drafts, no deeper than the block."""
    slots, largest = blocks.n_slots, env.most_drafted
    if tree.asks_for_tree:
        tree = _completed(tree, slots, largest)
        shape = tree.shape(
            env.context.n_batch,
            lambda nodes, depth: best_tree(typical_acceptance(sampling), nodes, depth),
            largest,
        )
    elif isinstance(tree.n, int):
        if tree.n < 1:
            raise OptionError(f"{expression}: n is {tree.n}: give 1 to {slots}")
        # llama.cpp, too, drafts no more than a block.
        shape = Topology.chain(min(tree.n, slots, env.context.n_batch - 1))
    else:
        most = min(slots, largest)
        if sampling != "argmax":
            shape = Topology.chain(most)
        else:
            # A chain is a tree whose nodes have one child each.
            is_chain = tree.n == "auto" or not env.target.can_branch
            shape = DynamicShape(most, 1 if is_chain else _TOPK, most if is_chain else largest)
    if shape.max_depth > slots:
        raise OptionError(
            f"{expression}: the block of {blocks.title} drafts {slots} tokens at most"
        )
    return shape
