"""Multi-token prediction (DeepSeek-V3): a target's own NextN blocks draft a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np

from specrun.bindings.contexts.context import MtpContext, StateBatch, check_nextn
from specrun.bindings.contexts.rows import Rows
from specrun.bindings.errors import OptionError
from specrun.bindings.models.model import Model
from specrun.bindings.models.nextn import nextn_tensors
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment, model_file_of
from specrun.runtime.drafters.kept_rows import ChainRows, RowMemory, copies_rows
from specrun.runtime.drafters.path_laws import RANKED_TOKENS, check_p_min, ranking_params
from specrun.runtime.drafters.states_drafter import StatesDrafter
from specrun.runtime.heads import FloatRows, RowPiece, TextRows
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.law import Law
from specrun.runtime.laws.transform import Logits, penalty_window, transformed_law
from specrun.runtime.memory.fit import resolve_gpu_layers
from specrun.runtime.models.pairing import check_blocks
from specrun.runtime.planning import DraftPlan
from specrun.runtime.planning.theory import multiplied
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest
from specrun.runtime.round.target import EvaluatedRows
from specrun.runtime.trees import draft_chain
from specrun.runtime.trees.tree import DraftTree

# == The state of NextN blocks in one conversation: pairs of its text, then a round's drafts =======
#
# The pair of position j is the token x_j with the state that the target had after x_(j-1); position
# 0 has no state before it, and gets zeros, as in llama.cpp (common/speculative.cpp at 0c1e570: this
# evaluates in the same order). Drafts are paired with the blocks' own states. After each round
# their pairs make way for real ones of what was accepted.


class MtpState(TextRows[None]):
    """The pairs of a text are rows of the target's states: that of position j is state j - 1's.

    So the first row is that of position -1, zeros. Cells are llama.cpp's, by position: a row's own
    is the one after its state's. With several blocks, block i predicts the i-th drafted token. Each
    has keys and values of its own for all pairs, but they share the cells: to let the next block
    write, positions are dropped and evaluated again, and the last token's pair stays pending,
    because only the first block has seen it when the draft ends.
    """

    def __init__(self, context: MtpContext) -> None:
        self.context = context
        self._batch = StateBatch(context.n_batch, context.model.n_embd_out)
        chunk = self._batch.capacity
        super().__init__(self._evaluate_all, context.n_ctx, ahead=1, chunk=chunk)
        # The last token's pair and those of the drafts.
        self._chain: list[tuple[int, FloatRows]] = []
        self._start = 0  # the position of the first of them
        self._next_state: FloatRows = self._batch.states[0]

    @property
    def base(self) -> int:
        """The position of the first pair: those before it were given up."""
        return super().base + 1

    def learn(self, start: int, rows: FloatRows, tokens: Sequence[int]) -> None:
        """Pair the states [n, width] of positions `start` on with the tokens after them."""
        if start == 0:
            start, rows = -1, np.concatenate([np.zeros_like(rows[:1]), rows])
        super().learn(start, rows, tokens)

    def root(self, tokens: Sequence[int]) -> Logits | None:
        """Evaluate what waits; return the logits after the last token, None if it is not known.

        The logits, as those of `after`, are a view that dies with the next evaluation.
        """
        several = self.context.n_blocks > 1
        # The pairs of accepted drafts ride along with the last one: an evaluation of their own
        # would cost more.
        piece = self.due(tokens, 1 if several else self.context.n_outputs)
        if piece is None:
            return None
        self._make_room(piece)
        self.context.select(0)
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        rows = self._decode(pairs, piece.position + 1, with_rows=True)
        # With several blocks the others lack this pair, so it stays pending (see the class).
        if not several:
            self.settle(piece)
        self._chain, self._start = pairs[-1:], len(tokens) - 1
        return self._keep_state(rows, len(pairs) - 1)

    def after(self, token: int) -> Logits:
        """Draft a token behind the last row and return the logits after it."""
        self._chain.append((token, self._next_state))
        if self.context.n_blocks == 1:
            position = self._start + len(self._chain) - 1
            return self._keep_state(self._decode(self._chain[-1:], position, with_rows=True), 0)
        # The next block has not seen the pairs since the last token.
        self.context.memory.truncate(self._start)
        self.context.select(len(self._chain) - 1)
        rows = self._decode(self._chain, self._start, with_rows=True)
        return self._keep_state(rows, len(self._chain) - 1)

    def _keep_state(self, rows: Rows, row: int) -> Logits:
        # A copy: the next decode overwrites the view before it is read.
        self._next_state = np.array(rows.nextn_state(row))
        return rows.logits(row)

    def _evaluate_all(self, piece: RowPiece) -> None:
        """Put pairs into their cells, in every block."""
        pairs = list(zip(piece.tokens, piece.rows, strict=True))
        self._make_room(piece)
        for block in range(self.context.n_blocks):
            # The cells stay the same ones, or a block would lose what it wrote before.
            self.context.memory.truncate(piece.position + 1)
            self.context.select(block)
            self._decode(pairs, piece.position + 1, with_rows=False)

    def _make_room(self, piece: RowPiece) -> None:
        """Drop what lies where the pairs belong and behind; everything before the first of all."""
        if piece.count:
            self.context.memory.truncate(piece.position + 1)
        else:
            self.context.memory.clear()

    def _decode(
        self, pairs: Sequence[tuple[int, FloatRows]], start: int, *, with_rows: bool
    ) -> Rows:
        n = len(pairs)
        if n == 1 and with_rows:
            self._batch.fill_one(pairs[0][0], start)
        else:
            tokens = [token for token, _ in pairs]
            self._batch.fill_chain(tokens, start, (0,), n if with_rows else 0)
        # Into the batch's own array: llama.cpp reads states from there, beside the tokens.
        for row, (_, state) in enumerate(pairs):
            self._batch.states[row] = state
        return self.context.decode(self._batch)


# == The drafter and its builder ===================================================================
#
# The blocks are the target's own, or of a file that holds them apart. They are shared; every
# conversation has a context over them. The builder stands at the end.


_BLOCK_OUTPUT = "nextn.shared_head_head.weight"
MtpSampling = Literal["argmax", "with"]


class MtpDrafter(StatesDrafter):
    """Drafts up to `num_draft_tokens` tokens in a row from the target's hidden states.

    A model with one block uses it again and again, on its own states; one with several has a block
    for each token. `sampling` "argmax" drafts point masses: the text stays plain decoding's own at
    every temperature. "with" draws from the blocks' law, transformed like the target's. `p_min`
    ends a chain before a token whose law gives no token that probability (at temperature 0: at
    temperature 1). With `length` a chain is as long as it pays, `num_draft_tokens` at most.

    It owns the context. `n_params` are the parameters that drafting adds to the target's: the
    blocks', or those of a whole file where they have one of their own; `depth_params` are those
    that a token multiplies.
    """

    needs_nextn_states = True
    keeps_rows = True

    def __init__(
        self,
        context: MtpContext,
        *,
        num_draft_tokens: int = 3,
        sampling: MtpSampling = "argmax",
        p_min: float = 0.0,
        length: DraftPlan | None = None,
        n_params: int = 0,
        depth_params: float = 0.0,
        name: str = "mtp",
    ) -> None:
        check_p_min(p_min)
        self._state = MtpState(context)
        super().__init__(name, self._state, context, n_params, length)
        self._depth_params = depth_params
        self.max_nodes, self._context, self._sampling = num_draft_tokens, context, sampling
        self._p_min = p_min
        self._row_memory = RowMemory()

    @property
    def depth_params(self) -> float:
        """A block's, and the output matrix."""
        return self._depth_params

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; none without the state before the last token or at the context's end."""
        rows = self._kept_rows(request)
        chain = self._chain(request, rows)
        return chain if rows is None else rows.of(chain)

    def _chain(self, request: DraftRequest, rows: ChainRows | None) -> DraftTree:
        start = len(request.tokens)
        # The last drafted token is not evaluated, hence one more than there are free cells.
        room = self._context.n_ctx - start + 1
        most = min(self.max_nodes, request.max_depth, request.max_nodes, room)
        root = self._state.root(request.tokens) if most > 0 else None
        if root is None:
            return DraftTree()
        points = self._sampling == "argmax" or request.params.is_greedy
        params, reads_law = request.params, self._p_min > 0.0 or self._length is not None
        if self._length is not None:
            # How much is drafted must not change a text from answer to answer.
            self._length.start(points=points and request.keep == "nothing")
        if points and not reads_law:
            # The most likely token is the same, and no law has to be made.
            params = params.favourites()
        elif params.is_greedy:
            params = ranking_params(params, RANKED_TOKENS)  # a greedy law is always certain

        # Views die with the next evaluation, so each row
        # becomes a law before the next is asked for.
        def law_after(drafted: list[int]) -> Law:
            row = self._state.after(drafted[-1]) if drafted else root
            if rows is not None:
                rows.take(len(drafted) - 1, row)
            window = penalty_window(request.tokens, drafted, params)
            return transformed_law(row, params, window, request.state)

        chain = draft_chain(
            law_after,
            request.noise,
            start,
            most=most,
            points=points,
            threshold=self._p_min,
            stop=self._length,
            end_tokens=request.end_tokens,
        )
        return self.stopped(chain)

    def _kept_rows(self, request: DraftRequest) -> ChainRows | None:
        """Return what keeps the rows that the request asks for."""
        if request.keep in ("nothing", "points"):
            return None
        state, context, text, start = (
            self._state,
            self._context,
            request.tokens,
            len(request.tokens),
        )
        # Of several blocks each says one token.
        most = context.n_ctx - start if context.n_blocks == 1 else context.n_blocks - 1

        def after(drafted: Sequence[int]) -> Logits | None:
            if len(drafted) > min(most, context.n_ctx - start):
                return None
            return state.after(drafted[-1]) if drafted else state.root(text)

        copies = copies_rows(request, points=self._sampling == "argmax")
        return ChainRows(self._row_memory, after, copies=copies)

    def read_states(self, rows: EvaluatedRows, wanted: Sequence[int]) -> FloatRows:
        """Return a copy [n, width] of what the blocks read of these rows."""
        return np.stack([rows.nextn_state(row) for row in wanted])


_MOST_RECURRENT = 3
"""Tokens where each that may be dropped again keeps one more recurrent state."""


def build_mtp(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `mtp(n=auto, sampling=argmax, p_min=0)`, or `mtp(mtp-blocks.gguf, ...)`."""
    options = options_of(expression)
    n = options.length("n")
    if n is not None and not 1 <= n < env.context.n_batch:
        most = f"{env.context.n_batch - 1} tokens, as many as a batch holds"
        raise OptionError(f"n is {n}: give 1 to {most}")
    schemes = list(get_args(MtpSampling))
    sampling = cast("MtpSampling", options.choice("sampling", schemes, "argmax"))
    p_min = options.number("p_min", 0.0)
    check_p_min(p_min)
    owns_model, model = bool(expression.arguments), env.target
    if owns_model:
        model = _open(model_file_of(expression, env), env)
    try:
        n_tokens = _n_tokens(expression, model, n, env.most_drafted)
        check_nextn(model)
    except BaseException:
        if owns_model:
            model.close()
        raise
    name, n_params = str(expression), model.n_params if owns_model else model.nextn.n_parameters
    # After a draft accepted as a whole, its n pairs and the last token's are one evaluation.
    context = dataclasses.replace(env.context, n_sequences=1, n_outputs=n_tokens + 1)
    depth_params = multiplied_of_block(model)
    share = depth_params / max(1, env.target.n_params)

    def start() -> MtpDrafter:
        opened = MtpContext(model, context)
        try:
            return MtpDrafter(
                opened,
                num_draft_tokens=n_tokens,
                sampling=sampling,
                p_min=p_min,
                length=None if n is not None else env.draft_plan(share),
                n_params=n_params,
                depth_params=depth_params,
                name=name,
            )
        except BaseException:
            opened.close()
            raise

    pace = env.pace_of(chooses=n is None, draws=sampling != "argmax")
    return DrafterWeights(name, start, [model] if owns_model else [], pace)


def multiplied_of_block(model: Model) -> float:
    """Return how many parameters a token multiplies in a NextN block and the output matrix.

    The blocks take turns. The output matrix is the model's where a block has none of its own.
    """
    blocks = nextn_tensors(model.path, model.header)
    own = multiplied(model.header, blocks) / max(1, model.nextn.count)
    has_output = any(tensor.name.endswith(_BLOCK_OUTPUT) for tensor in blocks)
    return own + (0 if has_output else model.n_embd * model.vocabulary.size)


def reads_own_blocks(expression: Expression) -> bool:
    """Whether a drafter may draft with the target's own NextN blocks, so that they must be loaded.

    Bare `auto` does where the target has some.
    """
    # Options are looked through too: an expression may stand inside another's value.
    if expression.atom in ("mtp", "auto") and not expression.arguments:
        return True
    inner = (*expression.arguments, *(value for _, value in expression.options))
    return any(map(reads_own_blocks, inner))


def _n_tokens(expression: Expression, model: Model, n: int | None, most: int) -> int:
    """Return the most tokens to draft: as asked, and with several blocks no more than there are."""
    blocks = model.nextn.count
    if blocks < 2:
        return n or (most if model.can_branch else min(most, _MOST_RECURRENT))
    if n is not None and n > blocks:
        limit = f"{blocks} NextN blocks, one for each token, so n is at most {blocks}"
        raise OptionError(f"{expression}: {model.path} has {limit}")
    return n or min(most, blocks)


def _open(path: Path, env: DraftEnvironment) -> Model:
    """Open a file of NextN blocks; raises `PairError` if they were not made for such a target."""
    layers = resolve_gpu_layers(env.n_gpu_layers, path, drafts=True)
    model = Model(path, n_gpu_layers=layers, use_mmap=env.use_mmap, load_nextn=True, drafts=True)
    try:
        check_nextn(model)
        check_blocks(env.target, model)
    except BaseException:
        model.close()
        raise
    return model
