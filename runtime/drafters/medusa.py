"""Medusa (Cai et al. 2024): heads that each guess one of the next tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.bindings.ggml.graph import Graph, GraphBuilder
from specrun.bindings.ggml.tensor import F32
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.batching import DraftMeeting, Joint, Shared
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.source import Asked, Source
from specrun.runtime.drafters.residual_heads import ResidualHeads
from specrun.runtime.drafters.tree_options import (
    head_accuracy,
    head_tree,
    ranks_by_depth,
    verifiable,
)
from specrun.runtime.heads import HeadFile, NamedChildren, NativeShare, TreePlan
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.transform import Logits
from specrun.runtime.planning import TYPICAL_ACCURACY
from specrun.runtime.planning.optimal_trees import medusa_tree
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest, Owned, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows

# == The heads (Cai et al. 2024, section 2.1.1) as a ggml graph ====================================
#
# Head k predicts the token k + 1 places after the one that the target itself predicts, from the
# same final hidden state h: p_k = softmax(W2_k (SiLU(W1_k h + b_k) + h)). Several residual blocks
# follow one another. Without W2_k of its own a head uses the target's output matrix.
#
# Tensors: `medusa.{k}.res.{j}.weight` (h, h) and `.bias` (h), `medusa.{k}.output.weight` (h,
# vocab); metadata `medusa.embedding_length`, `.vocab_size`, `.head_count`, `.block_count`.


_OPERATIONS = 42  # of a graph for each head, beside four for each of its blocks
MOST_STATES = 16
"""Hidden states of one evaluation: of several conversations, or of a whole text."""


@dataclass(slots=True)
class HeadsSaid:
    """The heads' results after a state: each one's tokens, the most likely first.

    `log_probs` are those of the tokens by their heads, if these were prepared for that.
    """

    tokens: list[list[int]]
    log_probs: list[npt.NDArray[np.float32]]


class MedusaHead(ResidualHeads):
    """The weights of a file's heads on the target's device. Close it before the target.

    They depend on the hidden state alone, so conversations share their graph, too.
    `ranks[k]` is how many tokens head k has to name; heads without an entry are left out.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        target: Model,
        *,
        n_threads: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        file = HeadFile(path, "medusa")
        file.check_target(target)
        self.whole_rows = self._probabilities = False
        super().__init__(file, target, n_threads)
        try:
            if ranks is not None:
                self.prepare(ranks)
        except BaseException:
            self.close()
            raise

    def prepare(
        self, ranks: Sequence[int], *, probabilities: bool = False, whole_rows: bool = False
    ) -> None:
        """Build the graph for one hidden state and heads that name so many tokens each.

        With `probabilities` it returns those, too, with `whole_rows` all logits.
        """
        self.check_depth(len(ranks))
        if max(ranks) > self.vocab_size:
            known = f"these Medusa heads have {self.vocab_size} tokens"
            raise OptionError(f"a tree of {max(ranks)} branches: {known}")
        self._close_graphs()
        self.ranks, self._probabilities, self.whole_rows = tuple(ranks), probabilities, whole_rows
        self._graph(1)

    def _graph(self, width: int) -> Graph:
        """Return the graph for so many hidden states, whole rows of one alone."""
        graph = self._graphs.get((width,))
        if graph is not None:
            return graph
        n_operations = self.n_heads * (4 * self.n_blocks + _OPERATIONS)
        with closing(GraphBuilder(self.device, n_operations)) as builder:
            features = builder.input("features", F32, self.hidden, width)
            for head, count in enumerate(self.ranks):
                logits = self.logits(builder, head, features)
                # Only the ranks leave the device: a row of logits is large.
                best = builder.best(logits, count)
                builder.output(f"tokens{head}", best[0])
                if self._probabilities:
                    total = builder.log_sum_exp(logits, best)
                    builder.output(f"log_probs{head}", builder.sub(best[1], total))
                if self.whole_rows and width == 1:
                    builder.output(f"logits{head}", logits)
            graph = self._graphs[(width,)] = builder.build()
        return graph

    def said_of(self, states: npt.NDArray[np.float32]) -> list[HeadsSaid]:
        """Return the heads' results after each final hidden state [n, hidden], in one evaluation.

        At most `MOST_STATES`. Raises `OptionError` before the heads were prepared.
        """
        if not self.ranks:
            raise OptionError("Medusa heads need their tree before they can be asked")
        n = len(states)
        graph = self._graph(1 << (n - 1).bit_length())
        given = graph.inputs["features"]
        given[:n], given[n:] = states, 0.0
        graph.compute()
        ranks = self.ranks
        shares: list[npt.NDArray[np.float32]] = []
        named = graph.numbers(*[f"tokens{head}" for head in range(len(ranks))])
        if self._probabilities:
            shares = [graph.floats(f"log_probs{head}").copy() for head in range(len(ranks))]
        return [
            HeadsSaid(
                [own[row * k : (row + 1) * k] for own, k in zip(named, ranks, strict=True)],
                [own[row] for own in shares],
            )
            for row in range(n)
        ]

    @property
    def rows(self) -> list[npt.NDArray[np.float32]]:
        """Each head's whole row of logits of the last single state: views."""
        graph = self._graph(1)
        rows = [graph.peek(f"logits{head}")[0] for head in range(len(self.ranks))]
        return [row.astype(np.float32, copy=False) for row in rows]


# == The heads for several conversations: their states are rows of one evaluation ==================
#
# The heads' results depend on a state alone, so any number of states have the same shape. If
# one conversation drafts alone, nothing is waited for.


State = npt.NDArray[np.float32]


SharedState = Shared[State, HeadsSaid]
"""The hidden state [1, hidden] that a conversation gives to the heads."""


class SharedHeads(Joint[SharedState]):
    """The heads of several conversations, and the states that they read."""

    def __init__(self, heads: MedusaHead, meeting: DraftMeeting) -> None:
        super().__init__(meeting)
        self._heads = heads

    def fitting(self) -> list[SharedState]:
        """Return the first states."""
        return self.asking[:MOST_STATES]

    def answers(self, taken: Sequence[SharedState]) -> tuple[list[HeadsSaid], list[float]]:
        """Evaluate the heads for all states at once."""
        before = self._heads.native_seconds
        said = self._heads.said_of(np.concatenate([asked.given for asked in taken]))
        seconds = self._heads.native_seconds - before
        return said, [seconds / len(taken)] * len(taken)


# == The source, and its builder ===================================================================


class MedusaSource(Source):
    """The heads in one conversation: children of depth k + 1 are head k's tokens by rank.

    That is so whatever their parent: the tree is a Cartesian product, cut to a shape. The hidden
    state is the one from which the target's own token came, so a round's first drafts need no
    evaluation of the target. In the first round of an answer it is the one before the prompt's last
    token, which is evaluated even if its keys and values were cached; models that cannot branch may
    lack it, and then nothing is drafted.

    The heads are shared and not closed here: the hidden state is all that a conversation owns.
    """

    needs_hidden_states = True
    rows_by_depth = names_trees = names_all_depths = True

    def __init__(self, heads: MedusaHead, together: SharedHeads | None = None) -> None:
        self._heads, self.keeps_rows = heads, heads.whole_rows
        self.n_params = heads.n_params
        self.depth_params = heads.depth_params
        self._native = NativeShare(heads.device)
        if together is not None and not self.keeps_rows:
            self.shared = Shared(together)
        # One value, so that Ctrl-C leaves no state with another one's length: the features
        # [1, hidden], and how many tokens were committed then.
        self.known: tuple[State, int] | None = None
        self._prompt_length = 0

    # -- the text ----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the last answer's hidden state."""
        self.known = None
        self._prompt_length = len(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Keep the hidden state before the prompt's last token."""
        # The last token is the root of the first round, so the prompt ends one before it.
        if start + count == self._prompt_length - 1:
            self.known = rows.hidden_states((count - 1,)), self._prompt_length

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the hidden state that the target's own token came from."""
        # Row 0 is the root's: the state before the target's own token is the last accepted node's.
        row = outcome.path[-1] + 1 if outcome.path else 0
        self.known = outcome.rows.hidden_states((row,)), len(outcome.tokens)

    # -- a draft -----------------------------------------------------------------------------------

    def named(self, request: DraftRequest, plan: TreePlan) -> NamedChildren | None:
        """Name a tree of the heads' tokens; None without the state of this text."""
        state = self._state_of(request)
        return None if state is None else self._children(self._say(state), plan)

    def depth_rows(self, request: DraftRequest) -> Sequence[Logits]:
        """Return each head's row, of the token at its depth."""
        state = self._state_of(request)
        if state is None:
            return ()
        self._say(state)
        return self._heads.rows

    def _state_of(self, request: DraftRequest) -> State | None:
        """Return the state to draft from; of another length of text it would be a wrong one."""
        known = self.known
        return None if known is None or len(request.tokens) != known[1] else known[0]

    def _say(self, state: State) -> HeadsSaid:
        """Evaluate the heads."""
        with self._native:
            return self._heads.said_of(state)[0]

    @staticmethod
    def _children(said: HeadsSaid, plan: TreePlan) -> NamedChildren:
        """Return a plan's children: every row of a depth has the same ones."""
        tokens: list[int] = []
        for named, width in zip(said.tokens, plan.widths, strict=False):
            tokens += named * width
        if not plan.has_values:
            return NamedChildren(tokens)
        above = np.zeros(1, np.float32)
        values: list[npt.NDArray[np.float32]] = []
        for depth, own in enumerate(said.log_probs[: len(plan.ranks)]):
            values.append(np.add.outer(above, own).ravel())
            if depth < len(plan.chosen):
                above = values[-1][[*(plan.chosen[depth] or ())]]
        return NamedChildren(tokens, np.concatenate(values))

    # -- evaluations with other conversations ------------------------------------------------------

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Have the heads evaluate this state with those of other conversations."""
        state = self._state_of(request)
        if state is None or self.shared is None or not isinstance(asked, TreePlan):
            return False
        self._plan = asked
        self.shared.ask(state)
        return True

    def result(self) -> NamedChildren | None:
        """Return the tree of the requested state; None before it was evaluated."""
        said = None if self.shared is None else self.shared.answered()
        return None if said is None else self._children(said, self._plan)

    # -- costs -------------------------------------------------------------------------------------

    @property
    def native_seconds(self) -> float:
        """Time in the heads' graph that this conversation ran."""
        shared = 0.0 if self.shared is None else self.shared.native_seconds
        return self._native.seconds + shared


def build_medusa(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `medusa(heads.gguf)`, with `tree=4x2` or `nodes=16, accuracy=FILE.csv`.

    If neither names the nodes, a round verifies the part of the largest tree that pays.
    """
    options = options_of(expression)
    path = model_file_of(expression, env)
    head = MedusaHead(path, env.target, n_threads=env.context.n_threads)
    share = head.evaluated_params / env.target.n_params
    chosen = options.optional("tree") is None and options.optional("nodes") in (None, "auto")
    try:
        if chosen:
            accuracy = head_accuracy(options, head.n_heads, head.accuracy)
            accuracy = verifiable(accuracy or TYPICAL_ACCURACY[: head.n_heads], env)
            topology = medusa_tree(accuracy, env.most_drafted)
        else:
            topology = head_tree(
                expression,
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
    together = None if env.meeting is None else SharedHeads(head, env.meeting)

    def start() -> GrowingDrafter:
        plan = env.draft_plan(share, depth=1) if chosen else None
        return GrowingDrafter(MedusaSource(head, together), topology, plan=plan, name=name)

    owned: list[Owned] = [head] if together is None else [together, head]
    return DrafterWeights(name, start, owned, env.pace_of(chooses=chosen))
