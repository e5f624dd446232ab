"""Medusa drafts a tree from one hidden state of the target (Cai et al. 2024); and its builder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.runtime.drafter import Drafter, DrafterWeights, DraftRequest, RoundOutcome
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, file_of
from specrun.runtime.drafters.medusa.medusa_head import MedusaHead
from specrun.runtime.drafters.tree_options import head_tree, ranks_by_depth
from specrun.runtime.heads import NativeShare
from specrun.runtime.language import Expression
from specrun.runtime.methods import options_of
from specrun.runtime.target import EvaluatedRows
from specrun.runtime.tree import DraftTree
from specrun.runtime.trees import Topology


class MedusaDrafter(Drafter):
    """Children of depth k + 1 are head k's tokens by rank, whatever their parent: point masses.

    The hidden state is the one from which the target's own token came, so a round's first drafts
    need no evaluation of the target. In the first round of an answer it is the one before the
    prompt's last token, which is evaluated even where its keys and values were cached; on models
    that cannot branch it may be missing, and nothing is drafted.

    The heads are shared and not closed here: the hidden state is all that a conversation has of its
    own.
    """

    needs_hidden_states = True

    def __init__(self, heads: MedusaHead, topology: Topology, *, name: str = "medusa") -> None:
        self.name = name
        self.max_nodes = len(topology)
        self.max_leaves = topology.n_leaves
        self._heads = heads
        self._native = NativeShare(heads)
        self._topology = topology
        # One value, so that Ctrl-C leaves no state with another one's length: the features, and how
        # many tokens were committed when they were taken.
        self._state: tuple[npt.NDArray[np.float32], int] | None = None
        self._prompt_length = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last answer's hidden state."""
        self._state = None
        self._prompt_length = len(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Keep the hidden state before the prompt's last token."""
        # The last token is the root of the first round, so the prompt ends one before it.
        if start + count == self._prompt_length - 1:
            self._keep(rows, count - 1, self._prompt_length)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the tree of the heads' tokens, cut where a limit asks for it."""
        topology = self._topology.limited(request.max_depth, request.max_nodes)
        # A state of another length of text would draft for the wrong position.
        if self._state is None or len(request.tokens) != self._state[1] or not len(topology):
            return DraftTree()
        with self._native:
            named = self._heads.best_tokens(self._state[0])
        places = zip(topology.depths, topology.ranks, strict=True)
        # Medusa's tree is a Cartesian product cut to a shape: a
        # token depends on depth and rank alone.
        tokens = [named[depth - 1][rank] for depth, rank in places]
        return DraftTree.of_points(tokens, topology.parents)

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the hidden state that the target's own token came from."""
        # Row 0 is the root's: the state before the target's own token is the last accepted node's.
        self._keep(outcome.rows, outcome.path[-1] + 1 if outcome.path else 0, len(outcome.tokens))

    def _keep(self, rows: EvaluatedRows, row: int, known: int) -> None:
        # A copy: rows are views that die with the next evaluation.
        self._state = np.array(rows.hidden_state(row), np.float32), known

    @property
    def native_seconds(self) -> float:
        """Time in the heads' graph that this conversation ran."""
        return self._native.seconds

    @property
    def n_params(self) -> int:
        """The heads' parameters."""
        return self._heads.n_params


def build_medusa(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `medusa(heads.gguf)`, with `tree=4x2` or `nodes=16, accuracy=FILE.csv`."""
    options = options_of(expression)
    path = file_of(expression, env)
    head = MedusaHead(path, env.target, n_threads=env.context.n_threads)
    try:
        topology = head_tree(
            expression,
            options,
            env,
            stored=head.accuracy,
            n_depths=head.n_heads,
            depth_cost=head.evaluated_params / head.n_heads / env.target.n_params,
        )
        head.prepare(ranks_by_depth(topology))
    except BaseException:
        head.close()
        raise
    name = str(expression)
    return DrafterWeights(name, lambda: MedusaDrafter(head, topology, name=name), [head])
