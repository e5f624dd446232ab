"""A draft model as a source of rows, for chains (Leviathan et al. 2023) and trees."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.growing.drafter import GrowingDrafter, Plan
from specrun.runtime.drafters.growing.source import Asked, NodeRows, Source
from specrun.runtime.laws.transform import Logits
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.eagle2 import DynamicShape
from specrun.runtime.trees.growth import TreeSampling
from specrun.runtime.trees.topology import Topology


class DraftModelSource(Source):
    """A draft model's rows; it owns the context of `state`.

    A chain is a part of the cached text, as plain decoding would extend it. The nodes of other
    shapes lie below the text in sequences of their own: the context needs as many, and as many
    output rows, as `draft_size` returns, and one sequence more for rules that read rows of leaves.
    """

    keeps_points = True

    def __init__(self, state: DraftModelState, shape: Topology | DynamicShape) -> None:
        self.state, self.context = state, state.context
        self.shared, model = state.part, self.context.model
        self.n_params, self.depth_params = model.n_params, multiplications(model)
        self._shape, self._is_chain = shape, isinstance(shape, Topology) and shape.n_leaves == 1
        n_sequences = draft_size(shape)[0]
        self.keeps_rows = self._is_chain or self.context.options.n_sequences > n_sequences

    # -- the text ----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of the prompt's common part with the last one."""
        self.state.begin(tokens)

    def learn_prompt(self, start: int, rows: EvaluatedRows, count: int) -> None:
        """Pass on: a cache may be chosen by the target's states."""
        self.state.learn_prompt(start, rows, count)

    def read_along(self, tokens: Sequence[int], end: int) -> None:
        """Read the prompt piece by piece."""
        self.state.read_along(tokens, end)

    def observe(self, outcome: RoundOutcome) -> None:
        """Keep the accepted tokens' cache, whoever drafted them, and drop the rest."""
        state, start, tokens = self.state, outcome.start, outcome.tokens
        state.learn_round(outcome)
        if self._is_chain:
            state.rewind(start + common_prefix(state.cached[start:], tokens[start:]))
        else:
            state.keep(tokens[start:])

    def rewind(self, length: int) -> None:
        """Drop the cache of tokens that were only guesses."""
        self.state.rewind(length)

    def has_room(self, tokens: Sequence[int]) -> bool:
        """Return whether the model can read a text of which it has cached a beginning."""
        return self.state.room(tokens) >= 0

    def row_after(self, tokens: Sequence[int]) -> Logits:
        """Return the model's own logits after all tokens of a text, a view [shared vocab]."""
        return self.state.feed(self._uncached(tokens))

    def _uncached(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are not cached; the last one's row is needed in any case."""
        state = self.state
        state.rewind(len(tokens) - 1)
        return tokens[len(state.cached) :]

    # -- a draft -----------------------------------------------------------------------------------

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind the text."""
        return self.state.room(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows:
        """Evaluate the end of the text: after an accepted draft two tokens at once."""
        return NodeRows([self.row_after(request.tokens)])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a depth in one batch."""
        state = self.state
        if self._is_chain:  # a window moves before a draft, never within it
            return NodeRows((state.feed_one(tokens[0]),))  # kept, it would keep the memory open
        return NodeRows(state.first(state.evaluate(parents, tokens), len(tokens)))

    def submit(self, request: DraftRequest, asked: Asked) -> bool:
        """Submit an evaluation with those of other conversations."""
        assert isinstance(asked, tuple)
        parents, tokens = asked
        if tokens and not self._is_chain:
            self.state.ask_depth(parents, tokens)
        else:
            self.state.ask(tokens or self._uncached(request.tokens))
        return True

    def result(self) -> NodeRows | None:
        """Return the rows of the requested evaluation; None before it was made."""
        state = self.state
        if not state.n_nodes:
            row = state.answer()
            return None if row is None else NodeRows([row])
        depth = state.answer_depth()
        if depth is None:
            return None
        return NodeRows(state.first(depth, state.depth_batch.n_tokens))

    # -- costs -------------------------------------------------------------------------------------

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self.context.native_seconds

    def close(self) -> None:
        """Free the context."""
        self.state.close()


def draft_size(shape: Topology | DynamicShape) -> tuple[int, int]:
    """Return how many sequences and output rows a draft model needs for trees of this shape."""
    if isinstance(shape, DynamicShape):
        return shape.n_draft_sequences, shape.topk
    return shape.n_inner_leaves, max(shape.inner_widths, default=1)


def model_drafter(
    state: DraftModelState,
    shape: Topology | DynamicShape,
    *,
    sampling: TreeSampling = "with",
    p_min: float = 0.0,
    plan: Plan | None = None,
    name: str = "draft",
) -> GrowingDrafter:
    """Return the drafter of a draft model, which owns the context of `state`."""
    source = DraftModelSource(state, shape)
    return GrowingDrafter(source, shape, sampling=sampling, p_min=p_min, plan=plan, name=name)
