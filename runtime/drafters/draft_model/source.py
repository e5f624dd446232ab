"""A draft model as a source of rows, for chains (Leviathan et al. 2023) and trees."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.compiled import draws_of
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.growing import GrowingDrafter, Plan
from specrun.runtime.drafters.source import Asked, NodeRows, Source
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, greedy_token
from specrun.runtime.planning.theory import multiplications
from specrun.runtime.round.drafter import DraftRequest, RoundOutcome
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.eagle2 import DynamicShape
from specrun.runtime.trees.growth import TreeSampling
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import DraftTree


class DraftModelSource(Source):
    """A draft model's rows; it owns the context of `state`.

    A chain is a part of the cached text, as plain decoding would extend it. The nodes of other
    shapes lie below the text in sequences of their own: the context needs as many, and as many
    output rows, as `draft_size` returns, and one sequence more for rules that read rows of leaves.
    """

    keeps_points = True

    def __init__(self, state: DraftModelState, shape: Topology | DynamicShape) -> None:
        self.state, self.context = state, state.context
        self.shares = state.shares_context
        self._shape, self._is_chain = shape, isinstance(shape, Topology) and shape.n_leaves == 1
        n_sequences = draft_size(shape)[0]
        self.keeps_rows = self._is_chain or self.context.options.n_sequences > n_sequences
        # Whether compiled code draws trees by these settings, and these: by their identity.
        self._drawing: tuple[SamplingParams, bool] | None = None

    # -- the text ----------------------------------------------------------------------------------

    def begin(self, tokens: Sequence[int]) -> None:
        """Keep the cache of what the prompt shares with the last one."""
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
        self.state.rewind(min(length, len(self.state.cached)))

    def has_room(self, tokens: Sequence[int]) -> bool:
        """Return whether the model can read a text of which it has cached a beginning."""
        return self.state.room(tokens) >= 0

    def row_after(self, tokens: Sequence[int]) -> Logits:
        """Return the model's own logits after all tokens of a text, a view [shared vocab]."""
        return self.state.feed(self._uncached(tokens))

    def _uncached(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are not cached; the last one's row is needed in any case."""
        state = self.state
        state.rewind(min(len(state.cached), len(tokens) - 1))
        return tokens[len(state.cached) :]

    # -- a draft -----------------------------------------------------------------------------------

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind the text."""
        self._uncached(tokens)
        return self.state.room(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows:
        """Evaluate the end of the text: after an accepted draft two tokens at once."""
        return NodeRows([self.row_after(request.tokens)])

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows:
        """Evaluate a depth in one batch."""
        state = self.state
        if self._is_chain:  # a window moves before a draft, never within it
            return NodeRows([state.feed_one(tokens[0])])
        return NodeRows(state.first(state.evaluate(parents, tokens), len(tokens)))

    @property
    def waits(self) -> bool:
        """Whether tokens are best evaluated with those of other conversations."""
        return self.state.waits

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

    # -- whole drafts in compiled code -------------------------------------------------------------

    def whole(
        self, request: DraftRequest, shape: Topology, sampling: TreeSampling
    ) -> DraftTree | None:
        """Return the most likely chain, or a drawn chain or tree."""
        state, params = self.state, request.params
        most = self.room(request.tokens) + 1  # the last node is not evaluated
        if most < len(shape):
            shape = shape.limited(request.max_depth, most)
        if params.is_greedy:
            plain = params.is_plain and not (params.has_penalties or params.logit_bias)
            if not self._is_chain or not plain or len(shape) < 2:
                return None
            return DraftTree.chain(self._likeliest(request, len(shape)))
        if request.state.grammar is not None or not shape.parents:
            return None
        if self._is_chain:
            if sampling != "with" or len(shape) < 2 or not state.can_draw_on(params):
                return None
            return self._drawn_chain(request, len(shape))
        if self._drawing is None or self._drawing[0] is not params:
            assert isinstance(self._shape, Topology)
            self._drawing = params, sampling == "without" and state.can_grow(self._shape, params)
        if not self._drawing[1]:
            return None
        draws = draws_of(request.noise, len(request.tokens), shape.max_depth)
        return state.grow_drawn(self._uncached(request.tokens), shape, draws, params)

    def _likeliest(self, request: DraftRequest, count: int) -> list[int]:
        """Return the most likely tokens in turn, from a single token on in compiled code."""
        state, params, ends = self.state, request.params, request.end_tokens
        uncached, tokens = self._uncached(request.tokens), None
        if len(uncached) == 1 and state.feeds_plainly:
            tokens = state.feed_likeliest(uncached[0], count, ends)
        if tokens is None:
            tokens = [greedy_token(state.feed(uncached), params)]
            if tokens[0] not in ends:
                tokens += state.feed_likeliest(tokens[0], count - 1, ends) or ()
        while len(tokens) < count and tokens[-1] not in ends:  # compiled code cannot
            tokens.append(greedy_token(state.feed_one(tokens[-1]), params))
        return tokens

    def _drawn_chain(self, request: DraftRequest, count: int) -> DraftTree:
        """Draw tokens in turn, as `tree_steps` does."""
        state, token, uncached = self.state, None, self._uncached(request.tokens)
        if len(uncached) == 1 and state.feeds_plainly and state.known(uncached[0]) == uncached[0]:
            token = uncached[0]
        else:
            state.feed(uncached)
        draws = draws_of(request.noise, len(request.tokens), count)
        return state.feed_drawn(token, draws, request.params, request.end_tokens)

    # -- costs -------------------------------------------------------------------------------------

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self.context.native_seconds

    @property
    def n_params(self) -> int:
        """The draft model's parameters."""
        return self.context.model.n_params

    @property
    def depth_params(self) -> float:
        """The draft model's."""
        return multiplications(self.context.model)

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
