"""Draft laws along the paths of a tree, and the tree that grows from them depth by depth.

Draft models, EAGLE's heads and Hydra's differ in what an evaluation returns, and in nothing else
here. Static shapes are grown as in `trees.growth`, dynamic ones (EAGLE-2) as in `trees.eagle2`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import StaleViewError
from specrun.runtime.compiled import LOOPS, DrawnSiblings, RowSource
from specrun.runtime.drafters.kept_rows import RowMemory
from specrun.runtime.heads import RankedTokens
from specrun.runtime.laws.law import SHORT, Law, RankedLaw
from specrun.runtime.laws.noise import NoiseSource, draws_of
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, penalty_window, transformed_law, transformed_laws
from specrun.runtime.round.drafter import DraftRequest
from specrun.runtime.trees.eagle2 import DynamicShape, NodeChoice, path_probability_steps
from specrun.runtime.trees.growth import (
    LawSource,
    Steps,
    TreeSampling,
    drive,
    proposal_scheme,
    tree_steps,
)
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import ROOT, DraftTree


@dataclass(slots=True)
class HighestLogits:
    """The tokens of the highest logits after n nodes, one more than top-k keeps: both [n, k + 1].

    Tokens ascend. As top-k leaves no others, they say the same law as whole rows, if no two of a
    row that top-k parts are equal.
    """

    tokens: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]

    def laws(self, params: SamplingParams) -> list[Law]:
        """Return the laws that `params` make of the rows: plain ones, no bias, no penalties."""
        # In the order of their ids, as in a whole row, so that ties within the top k fall alike.
        return transformed_laws(list(self.logits), params, names=self.tokens)


EvaluatedDepth = RankedTokens | HighestLogits | Sequence[Logits]
"""What is said after n nodes: their best tokens, their highest logits, or whole rows of logits."""

Paths = Callable[[], list[list[int]]]
"""The drafted tokens down to each of the nodes that are evaluated, their own included."""


class PathLaws:
    """A drafter's laws after the tokens of a request: a `LawSource`.

    `root()` evaluates what stands before the draft, `below(parents, tokens, paths)` a depth of it,
    numbered as in `LawSource.below`. Best tokens are a law as they are; rows of logits are
    transformed by `params`, whose penalties see each node's own path.
    """

    def __init__(
        self,
        root: Callable[[], EvaluatedDepth],
        below: Callable[[Sequence[int], Sequence[int], Paths], EvaluatedDepth],
        request: DraftRequest,
        params: SamplingParams,
    ) -> None:
        self._root, self._below, self._request = root, below, request
        self._params = params
        self._parents: list[int] = []  # of all evaluated nodes
        self._tokens: list[int] = []
        self._said: EvaluatedDepth | None = None  # of the root, if it was evaluated just now

    def root(self) -> Law:
        """Return the law after the last committed token."""
        said, self._said = self._said, None
        return self._laws(self._root() if said is None else said, _no_paths)[0]

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> list[Law]:
        """Evaluate one depth of the tree."""
        return self._laws(*self._said_below(parents, tokens))

    def _said_below(
        self, parents: Sequence[int], tokens: Sequence[int]
    ) -> tuple[EvaluatedDepth, Paths]:
        # Noted before the evaluation, which may ask for the paths.
        first = len(self._tokens)
        self._parents += parents
        self._tokens += tokens

        def paths() -> list[list[int]]:
            return [self._path(node) for node in range(first, first + len(tokens))]

        return self._below(parents, tokens, paths), paths

    def drawn_tree(self, topology: Topology) -> DraftTree | None:
        """Return a tree that compiled code draws without replacement, depth by depth.

        It is the one that `tree_steps` grows. None, and nothing is drawn, where it cannot.
        """
        request, params, loops = self._request, self._params, LOOPS
        k = params.cuts[0]
        few = params.is_cut and not params.is_greedy and k <= SHORT
        if loops is None or not few:
            return None
        if request.state.grammar is not None:
            return None
        said, paths = self._root(), _no_paths
        entries = _entries(said, k)
        if entries is None:
            self._said = said
            return None
        children, start = topology.children, len(request.tokens)
        scratch, cuts, tree = np.empty(k), (np.exp, *params.cuts[1:]), _DrawnTree([], [], {})
        level = [children[ROOT]], [ROOT], ROOT
        for position in range(start, start + topology.max_depth):
            draws = draws_of(request.noise, position, 1)
            drawn = loops.drawn_depth(*entries, level, children, draws, scratch, cuts, tree)
            if drawn is None:
                self._laws(said, paths)  # says what is wrong
                raise AssertionError("rows that are laws to Python alone")
            below, nodes, parents, tokens = drawn
            if not tokens:
                break
            level = below, nodes, len(self._tokens)
            said, paths = self._said_below(parents, tokens)
            entries = _entries(said, k)
            assert entries is not None
        return DraftTree.of_siblings((*tree.tokens,), (*tree.parents,), tree.siblings)

    def read(
        self, parents: Sequence[int], tokens: Sequence[int], said: EvaluatedDepth
    ) -> list[Law]:
        """Return the laws after a depth that was evaluated elsewhere; without tokens, the root."""
        first = len(self._tokens)
        self._parents += parents
        self._tokens += tokens
        nodes = range(first, first + len(tokens))
        return self._laws(said, lambda: [*map(self._path, nodes)] if tokens else [[]])

    def after(self, drafted: Sequence[int]) -> Law:
        """Return the law after a chain, whose laws before were asked for in turn."""
        # A chain's nodes are evaluated in turn: that before the last one has the number below.
        return self.below([len(drafted) - 2], drafted[-1:])[0] if drafted else self.root()

    def _laws(self, said: EvaluatedDepth, paths: Paths) -> list[Law]:
        if isinstance(said, RankedTokens):
            # Ranked on the head's device: there is no row left to transform.
            return list(RankedLaw.of_rows(said.tokens, said.log_probs))
        params, state = self._params, self._request.state
        if isinstance(said, HighestLogits):
            return said.laws(params)
        if not params.has_penalties:  # nobody asks for the paths
            return transformed_laws([*said], params, state)
        # The window that the target's law has at the node: penalties see its own path.
        windows = [penalty_window(self._request.tokens, path, params) for path in paths()]
        rows = zip(said, windows, strict=True)
        return [transformed_law(row, params, window, state) for row, window in rows]

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[node])
            node = self._parents[node]
        path.reverse()
        return path


def _no_paths() -> list[list[int]]:
    return [[]]


class _DrawnTree(NamedTuple):
    """A tree in the making: tokens, parents, and siblings by their parents."""

    tokens: list[int]
    parents: list[int]
    siblings: DrawnSiblings


def _entries(said: EvaluatedDepth, k: int) -> tuple[RowSource, npt.NDArray[np.int32] | None] | None:
    """Return rows and their entries' names, if any; None where there are not more than k."""
    if isinstance(said, HighestLogits):
        return said.logits.data, said.tokens
    if isinstance(said, RankedTokens) or len(said[0]) <= k:
        return None
    return said.__getitem__, None


def grow_draft(
    shape: Topology | DynamicShape,
    laws: LawSource,
    request: DraftRequest,
    *,
    room: int | None = None,
    sampling: TreeSampling = "argmax",
    p_min: float = 0.0,
    size: NodeChoice | None = None,
) -> DraftTree:
    """Return a tree of a shape, as far as the request's limits and the drafter's own allow.

    The rest is as for `draft_steps`.
    """
    if sampling == "without" and isinstance(shape, Topology) and isinstance(laws, PathLaws):
        topology = shape.limited(*_limits(request, room))
        drawn = laws.drawn_tree(topology) if topology.parents and p_min == 0.0 else None
        if drawn is not None:
            return drawn
    steps = draft_steps(shape, request, room=room, sampling=sampling, p_min=p_min, size=size)
    return drive(steps, laws)


def _limits(request: DraftRequest, room: int | None) -> tuple[int, int]:
    """Return the greatest depth, and the most nodes: the last one of a tree is not evaluated."""
    most = request.max_nodes
    return request.max_depth, most if room is None else min(most, room + 1)


def draft_steps(
    shape: Topology | DynamicShape,
    request: DraftRequest,
    *,
    room: int | None = None,
    sampling: TreeSampling = "argmax",
    p_min: float = 0.0,
    size: NodeChoice | None = None,
) -> Steps[DraftTree]:
    """Grow a tree as `grow_draft` does, the laws given step by step.

    `room` is how many nodes the drafter can evaluate (None: any number); the last node of a tree
    never is. `sampling` says how the children of a static shape are proposed; at temperature 0 they
    are the most likely tokens. Nothing is drafted below a law that gives no token the probability
    `p_min`. With `size` a dynamic tree has only those nodes that pay.
    """
    max_depth, max_nodes = _limits(request, room)
    if max_nodes < 1 or max_depth < 1:
        return DraftTree()
    if isinstance(shape, DynamicShape):
        if room is not None:
            # It evaluates topk nodes of every depth but the last, more than it keeps.
            max_depth = min(max_depth, 1 + room // shape.topk)
        limited = shape.limited(max_depth, max_nodes)
        return (yield from path_probability_steps(limited, p_min, size))
    topology = shape.limited(max_depth, max_nodes)
    # A greedy law is sure of one token: draws from it would make no siblings.
    scheme = proposal_scheme("argmax" if request.params.is_greedy else sampling)
    start = len(request.tokens)
    return (yield from tree_steps(topology, scheme, request.noise, start, p_min))


def copies_rows(request: DraftRequest, *, points: bool) -> bool:
    """Return whether a request asks for the rows of all places, not only the last one.

    `points` says that drafts are chosen, not drawn: a draw says its law itself; so does, at
    temperature 0, the token that was drafted.
    """
    return request.keep == "rows" or (points and not request.params.is_greedy)


class KeptRows(ABC):
    """What the two kinds share: rows by the number of their evaluation, alive for one round."""

    def __init__(self, memory: RowMemory, *, copies: bool) -> None:
        self._memory, self._generation, self._copies = memory, memory.reuse(), copies
        self._rows: dict[int, Logits] = {}
        # Not the tree that is returned: it would keep itself, and its rows, alive.
        self._tree = DraftTree()

    def of(self, tree: DraftTree) -> DraftTree:
        """Return the tree with its rows."""
        self._tree = tree
        return DraftTree(
            tree.tokens, tree.parents, tree.depths, tree.is_candidate, tree.draws, self
        )

    def logits(self, node: int) -> Logits | None:
        """Return the row after a node (or ROOT), None if there is none.

        Raises `StaleViewError` once the next draft has begun.
        """
        if self._generation != self._memory.generation:
            raise StaleViewError("the rows of a draft died with the drafter's next draft")
        return self._found(node)

    @abstractmethod
    def _found(self, node: int) -> Logits | None:
        """Return the row after a node, evaluated now if need be."""


After = Callable[[Sequence[int]], Logits | None]
"""Evaluates the last of the drafted tokens; without any, the text. None: there is no room."""


class ChainRows(KeptRows):
    """Rows of a chain's nodes; with `copies` all, else the last one. `after` evaluates that."""

    def __init__(self, memory: RowMemory, after: After, *, copies: bool) -> None:
        super().__init__(memory, copies=copies)
        self._after = after

    def take(self, node: int, row: Logits) -> None:
        """Note the row after a node, which was evaluated just now."""
        if self._copies:
            row = self._memory.copy_of(row)
        else:
            self._rows.clear()  # the others die with this evaluation
        self._rows[node] = row

    def _found(self, node: int) -> Logits | None:
        row = self._rows.get(node)
        tokens = self._tree.tokens
        if row is None and node == len(tokens) - 1:
            row = self._after(tokens)
            if row is not None:
                self._rows[node] = row  # nothing is evaluated before the next draft
        return row


class EvaluatedNodes(Protocol):
    """The nodes of a tree that a drafter evaluated, numbered in their order."""

    def place_of(self, parent: int, token: int) -> int | None:
        """Return the number of the node of a token below another (or ROOT), None if none is."""

    def leaf(self, parent: int, token: int) -> tuple[int, Logits] | None:
        """Evaluate a token below a node; return its number and its row, None without room."""

    def root(self) -> Logits | None:
        """Evaluate the text alone; return the row after it, None if there is none."""


class TreeRows(KeptRows):
    """Rows of a tree's nodes; with `copies` all that the draft evaluated.

    A tree that branches evaluates what has children: only leaves are missing then.
    """

    def __init__(self, memory: RowMemory, nodes: EvaluatedNodes, *, copies: bool) -> None:
        super().__init__(memory, copies=copies)
        self._nodes = nodes

    def take(self, first: int, rows: Sequence[Logits]) -> None:
        """Note the rows of evaluated nodes, numbered from `first` on."""
        if self._copies:
            copied = self._memory.copy_of
            self._rows.update((node, copied(row)) for node, row in enumerate(rows, first))

    def _found(self, node: int) -> Logits | None:
        place = ROOT
        path = [self._tree.tokens[above] for above in self._tree.path_to(node)]
        for depth, token in enumerate(path, 1):
            below = self._nodes.place_of(place, token)
            if below is None:
                found = self._nodes.leaf(place, token) if depth == len(path) else None
                return None if found is None else self._keep(*found)
            place = below
        if place == ROOT and ROOT not in self._rows and not self._tree.draws:
            row = self._nodes.root()
            return None if row is None else self._keep(ROOT, row)
        return self._rows.get(place)

    def _keep(self, place: int, row: Logits) -> Logits:
        # The walk reads a node's row once; whoever asks again gets the same numbers.
        self._rows[place] = row = self._memory.copy_of(row)
        return row


class ChainStop(Protocol):
    """Ends a chain by what it knows before a token is drawn: laws, and earlier rounds."""

    def goes_on(self) -> bool:
        """Whether the drafter shall be asked for the law of another token."""

    def takes(self, certainty: float) -> bool:
        """Whether a token of the law is drafted; `certainty` is the greatest probability in it."""


def draft_chain(
    law_after: Callable[[list[int]], Law],
    noise: NoiseSource,
    start: int,
    *,
    most: int,
    points: bool,
    threshold: float = 0.0,
    always_first: bool = False,
    stop: ChainStop | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> DraftTree:
    """Return a chain of up to `most` tokens, the first at position `start`.

    `law_after(tokens)` is the draft law after the tokens drafted so far. With `points` the most
    likely token is a point mass; otherwise each token is drawn, and its law stored. The chain ends
    before a token whose law gives none the probability `threshold`: that is read before the draw,
    so exactness holds. `always_first` excepts the first token. `stop` ends it where it likes, by
    the same means. Nothing follows one of `end_tokens`.
    """
    steps = chain_steps(
        noise,
        start,
        most=most,
        points=points,
        threshold=threshold,
        always_first=always_first,
        stop=stop,
        end_tokens=end_tokens,
    )
    try:
        drafted = next(steps)
        while True:
            drafted = steps.send(law_after(drafted))
    except StopIteration as ended:
        tree: DraftTree = ended.value
        return tree


def chain_steps(
    noise: NoiseSource,
    start: int,
    *,
    most: int,
    points: bool,
    threshold: float = 0.0,
    always_first: bool = False,
    stop: ChainStop | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Generator[list[int], Law, DraftTree]:
    """Draft as `draft_chain` does: yields what is drafted so far, and takes the law after it."""
    tokens: list[int] = []
    laws: list[Law] = []
    while len(tokens) < most and not (tokens and tokens[-1] in end_tokens):
        if stop is not None and not stop.goes_on():
            break
        law = yield tokens
        if threshold > 0.0 and (tokens or not always_first) and law.most_likely[1] < threshold:
            break
        if stop is not None and not stop.takes(law.most_likely[1]):
            break
        if points:
            tokens.append(law.most_likely[0])
            continue
        noise.seek(start + len(tokens))
        tokens.append(noise.choose(law))
        laws.append(law)
    return DraftTree.chain(tokens, None if points else laws)
