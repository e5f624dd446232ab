"""Medusa drafts a tree from one hidden state of the target (Cai et al. 2024); and its builder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from specrun.runtime.costs import TYPICAL_ACCURACY
from specrun.runtime.costs.medusa_tree import medusa_tree
from specrun.runtime.costs.tree_size import TreeSize
from specrun.runtime.drafter import Drafter, DrafterWeights, DraftRequest, Owned, RoundOutcome
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.kept_rows import KeptRows, RowMemory
from specrun.runtime.drafters.medusa.medusa_head import HeadsSaid, MedusaHead
from specrun.runtime.drafters.medusa.together import AskedState, HeadsTogether
from specrun.runtime.drafters.tree_options import head_accuracy, head_tree, ranks_by_depth
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.transform import Logits
from specrun.runtime.tree import ROOT, DraftTree
from specrun.runtime.trees import Topology


class MedusaRows(KeptRows):
    """Each head's row is the law of its depth: head k's, whatever the path of k tokens above.

    Below the last head nothing is known.
    """

    def __init__(self, memory: RowMemory, rows: Sequence[Logits]) -> None:
        super().__init__(memory, copies=True)
        self._by_depth = [memory.copy_of(row) for row in rows]

    def _found(self, node: int) -> Logits | None:
        depth = 0 if node == ROOT else self._tree.depths[node]
        return self._by_depth[depth] if depth < len(self._by_depth) else None


class MedusaDrafter(Drafter):
    """Children of depth k + 1 are head k's tokens by rank, whatever their parent: point masses.

    The hidden state is the one from which the target's own token came, so a round's first drafts
    need no evaluation of the target. In the first round of an answer it is the one before the
    prompt's last token, which is evaluated even where its keys and values were cached; on models
    that cannot branch it may be missing, and nothing is drafted.

    With `size` a round has those nodes of the tree that pay.

    The heads are shared and not closed here: the hidden state is all that a conversation has of its
    own.
    """

    needs_hidden_states = True

    def __init__(
        self,
        heads: MedusaHead,
        topology: Topology,
        *,
        size: TreeSize | None = None,
        together: HeadsTogether | None = None,
        name: str = "medusa",
    ) -> None:
        self.name, self._size = name, size
        self.max_nodes = len(topology)
        self.max_leaves = topology.n_leaves
        self._heads = heads
        self._native_seconds = 0.0
        self._together, self.waits = together, together is not None
        self._asked: AskedState | None = None
        self._topology = topology
        # Takes the whole tree's tokens from those of all heads, in one call.
        self._pick: Callable[[list[int]], tuple[int, ...]] | None = None
        # One value, so that Ctrl-C leaves no state with another one's length: the features
        # [1, hidden], and how many tokens were committed then.
        self._state: tuple[npt.NDArray[np.float32], int] | None = None
        self._prompt_length = 0
        self.keeps_rows = heads.whole_rows
        self._row_memory = RowMemory()

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last answer's hidden state."""
        self._withdraw()
        self._state = None
        self._prompt_length = len(tokens)
        if self._size is not None:
            self._size.begin()

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Keep the hidden state before the prompt's last token."""
        # The last token is the root of the first round, so the prompt ends one before it.
        if start + count == self._prompt_length - 1:
            self._state = rows.hidden_states((count - 1,)), self._prompt_length

    def prepare(self, request: DraftRequest) -> bool:
        """Have the heads asked about this state with those of other conversations."""
        if self._asked is not None:
            return self._asked.is_answered
        together = self._together
        if together is None or not together.waits or self.keeps_rows:
            return True
        state = self._asked_about(request)
        if state is None:
            return True
        if self._size is not None and not self._size.depth_to_ask():
            return True
        self._asked = together.ask(state)
        return False

    def _asked_about(self, request: DraftRequest) -> npt.NDArray[np.float32] | None:
        """Return the state to draft from; of another length of text it would be a wrong one."""
        state = self._state
        return None if state is None or len(request.tokens) != state[1] else state[0]

    def _ask(self, state: npt.NDArray[np.float32]) -> HeadsSaid:
        """Return what the heads say of a state, if they were not asked about it before."""
        asked, self._asked = self._asked, None
        if asked is not None and asked.state is state and asked.is_answered:
            self._native_seconds += asked.seconds
            return asked.said
        device, before = self._heads.device, self._heads.device.native_seconds
        said = self._heads.said_of_one(state)
        self._native_seconds += device.native_seconds - before
        return said

    def _withdraw(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and self._together is not None:
            self._together.withdraw(asked)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the tree of the heads' tokens, cut where a limit asks for it."""
        tree = self._drafted_tree(request)
        if request.keep in ("nothing", "points") or not self.keeps_rows:
            return tree
        state = self._asked_about(request)
        if state is None:
            return tree
        if not len(tree):  # then nobody asked the heads, maybe
            self._ask(state)
        return MedusaRows(self._row_memory, self._heads.rows).of(tree)

    def _drafted_tree(self, request: DraftRequest) -> DraftTree:
        topology = self._topology.limited(request.max_depth, request.max_nodes)
        state = self._asked_about(request)
        if state is None or not topology.parents:
            return DraftTree()
        if self._size is not None:
            return self._what_pays(topology, state, self._size)
        named = self._ask(state).tokens
        # Medusa's tree is a Cartesian product cut to a shape: a
        # token depends on depth and rank alone.
        if topology is not self._topology or len(topology.parents) < 2:
            places = zip(topology.depths, topology.ranks, strict=True)
            tokens = (named[depth - 1][rank] for depth, rank in places)
            return DraftTree.of_points((*tokens,), topology.parents)
        if self._pick is None:
            self._pick = _picker(topology, [*map(len, named)])
        return DraftTree.of_points(self._pick([*chain.from_iterable(named)]), topology.parents)

    def _what_pays(
        self, topology: Topology, state: npt.NDArray[np.float32], size: TreeSize
    ) -> DraftTree:
        """Return those nodes of the tree that pay, by the heads' probabilities."""
        if not size.depth_to_ask():
            return DraftTree()
        said = self._ask(state)
        named, probabilities = said.tokens, said.probabilities
        values: list[float] = []
        places = list(zip(topology.depths, topology.ranks, strict=True))
        for (depth, rank), parent in zip(places, topology.parents, strict=True):
            above = 1.0 if parent == ROOT else values[parent]
            values.append(above * probabilities[depth - 1][rank])
        kept = size.best(values, topology.parents, len(values))
        new = {ROOT: ROOT} | {node: place for place, node in enumerate(kept)}
        tokens = [named[places[node][0] - 1][places[node][1]] for node in kept]
        parents = tuple(new[topology.parents[node]] for node in kept)
        return size.drafted(DraftTree.of_points(tokens, parents))

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the hidden state that the target's own token came from."""
        # Row 0 is the root's: the state before the target's own token is the last accepted node's.
        row = outcome.path[-1] + 1 if outcome.path else 0
        self._state = outcome.rows.hidden_states((row,)), len(outcome.tokens)
        if self._size is not None:
            self._size.observe(outcome)

    @property
    def native_seconds(self) -> float:
        """Time in the heads' graph that this conversation ran."""
        return self._native_seconds

    @property
    def n_params(self) -> int:
        """The heads' parameters."""
        return self._heads.n_params

    @property
    def depth_params(self) -> float:
        """A head's, and the output matrix that it reads."""
        return self._heads.evaluated_params / self._heads.n_heads


def _picker(topology: Topology, n_named: Sequence[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """Return what takes a tree's tokens from those that the heads name, one head after the other.

    `n_named` says how many that are of each; the tree has at least two nodes.
    """
    first = [0, *accumulate(n_named)]
    places = zip(topology.depths, topology.ranks, strict=True)
    return itemgetter(*(first[depth - 1] + rank for depth, rank in places))


def build_medusa(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `medusa(heads.gguf)`, with `tree=4x2` or `nodes=16, accuracy=FILE.csv`.

    Where neither says which nodes there are, a round verifies what pays of the largest tree.
    """
    options = options_of(expression)
    path = model_file_of(expression, env)
    head = MedusaHead(path, env.target, n_threads=env.context.n_threads)
    share = head.evaluated_params / env.target.n_params
    chosen = options.optional("tree") is None and options.optional("nodes") in (None, "auto")
    try:
        if chosen:
            accuracy = head_accuracy(options, head.n_heads, head.accuracy)
            topology = medusa_tree(accuracy or TYPICAL_ACCURACY[: head.n_heads], env.most_drafted)
        else:
            topology = head_tree(
                expression,
                options,
                env,
                stored=head.accuracy,
                n_depths=head.n_heads,
                depth_cost=share / head.n_heads,
            )
        ranks = list(ranks_by_depth(topology))
        if env.keeps_rows and len(ranks) < head.n_heads:
            ranks.append(1)  # of the token after a whole draft
        head.prepare(ranks, probabilities=chosen, whole_rows=env.keeps_rows)
    except BaseException:
        head.close()
        raise
    name = str(expression)
    together = None if env.meeting is None else HeadsTogether(head, env.meeting)

    def start() -> MedusaDrafter:
        size = env.tree_size(share) if chosen else None
        return MedusaDrafter(head, topology, size=size, together=together, name=name)

    owned: list[Owned] = [head] if together is None else [together, head]
    return DrafterWeights(name, start, owned, env.pace_of(chooses=chosen))
