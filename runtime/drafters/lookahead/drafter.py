"""Lookahead decoding (Fu et al. 2024) and Jacobi decoding (Santilli et al. 2023)."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.lookahead.pool import (
    MAX_NGRAM,
    Guesses,
    LatestGuesses,
    NgramStore,
    PlannedGuesses,
    open_store,
)
from specrun.runtime.language import Expression, options_of
from specrun.runtime.planning import CostCurve
from specrun.runtime.round.drafter import Drafter, DrafterWeights, DraftRequest, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees import check_leaves
from specrun.runtime.trees.growth import TreeBuilder
from specrun.runtime.trees.tree import ROOT, DraftTree

# == The window's width as planned, and when it is closed ==========================================
#
# The plan is the paper's model of the yield over this machine's costs:
#
# Fu et al. (2024), section 4.1. A good speculation of b guesses with g = N - 1 tokens each,
# accepted with probability a a token, yields E = (g + 1) - sum_{i=1..g} (1 - a^i)^b tokens with the
# target's own; one round in f has one. So a round yields S = (f - 1 + E) / f tokens, where W = G =
# b. The plan maximises S T(1) / T(n) over W = G, where T is the measured cost of an evaluation and
# n its tokens: root, window and guesses. If nothing exceeds 1, it does not look ahead.
#
# While decoding, a `WindowGuard` lets the window borrow only so much time before it has to pay. The
# window's cost in a round is the curve's time for its nodes beside the guesses; its gain is
# the accepted tokens that no other source of n-grams knew. Both are counted in tokens of plain
# decoding. The window is closed where the debt exceeds a credit that grows with the text, and
# opened again when the grown credit covers twice the debt; so the whole loss is bounded by
# `_CREDIT` tokens and `_SHARE` of the text. Nothing is timed: the same text closes it at the same
# place.


# Fitted by the paper for LLaMA-2-7B-Chat on MT-Bench (its figure 4).
_ACCEPTANCE = 0.425
_ROUNDS_PER_HIT = 3.106
_WIDEST = 15
_WORTH = 1.02  # a plan must gain more than rounding


def guessed_tokens(acceptance: float, n_draft: int, n_guesses: int) -> float:
    """Return E = (g + 1) - sum_{i=1..g} (1 - a^i)^b: tokens of a round with b guesses of g tokens.

    Fu et al. (2024), equation 4: the longest accepted prefix of independent guesses, and the
    target's own token. One guess gives Leviathan's equation 1.
    """
    # For small a the terms are near 1, and their sum is subtracted from g + 1: hence fsum.
    missed = math.fsum((1.0 - acceptance**length) ** n_guesses for length in range(1, n_draft + 1))
    return n_draft + 1 - missed


def planned_width(curve: CostCurve, ngram: int) -> int:
    """Return the W = G of most tokens a second; 0 does not look ahead: plain decoding wins."""
    best, most = 0, _WORTH
    for width in range(1, _WIDEST + 1):
        # Window and guesses; the root is the window's column 0 of row 0.
        n_tokens = 2 * width * (ngram - 1)
        guessed = guessed_tokens(_ACCEPTANCE, ngram - 1, width)
        # S = (f - 1 + E) / f: tokens a round if one in f guesses well (equation 5).
        yielded = (_ROUNDS_PER_HIT - 1.0 + guessed) / _ROUNDS_PER_HIT
        speed_up = yielded * curve.seconds(1) / curve.seconds(n_tokens)
        # Strictly more, so that of equal plans the narrowest is kept.
        if speed_up > most:
            best, most = width, speed_up
    return best


_CREDIT = 8.0  # tokens of plain decoding that a window may cost at first
_SHARE = 0.02  # of all tokens, which it may cost beside them


class WindowGuard:
    """Opens and closes a window by its debt."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self.forget()

    def forget(self) -> None:
        """Return to the first credit."""
        self.debt = 0.0
        self.is_open = True
        self._n_tokens = 0

    def count(self, n_guessed: int, n_window: int, gained: int, n_tokens: int) -> None:
        """Count a round of so many nodes and `n_tokens`, `gained` of them thanks to the window."""
        curve, without = self._curve, 1 + n_guessed
        self._n_tokens += n_tokens
        cost = curve.seconds(without + n_window) - curve.seconds(without) if n_window else 0.0
        # Old gains do not pay for a window that gains no more.
        self.debt = max(self.debt + cost / curve.seconds(1) - gained, -_CREDIT)
        credit = _CREDIT + _SHARE * self._n_tokens
        # Half the credit to open again: else the window would flap at the limit.
        self.is_open = self.debt <= (credit if self.is_open else credit / 2.0)


# == The lookahead branch: several Jacobi iterations at once, as nodes of one tree =================
#
# These nodes are evaluated and never accepted. Fu et al. (2024), section 3.1 and figure 2. With
# window W and n-gram size N there are N - 1 rows of W columns. Column 0 of row 0 is the root, the
# last committed token; the rest of row 0 is a chain below it; row r of a column hangs below its
# row r - 1, so that it stands at position (column + row) after the root and sees row 0 up to its
# column, then its own column. That is (N - 1) W - 1 nodes and W leaves. The target's greedy token
# after a column's last row completes an n-gram; then every row moves up by one, and those tokens
# become the last row. Tokens that move up keep their positions, because the root moved on by one.
#
# Warm-up begins with one row of W + N - 3 random tokens and adds a row a pass for N - 2 passes.
# Each pass drops column 0: the root has taken the place of column 1.


def window_nodes(width: int, n: int) -> int:
    """Return the most nodes of any pass: (N - 1) W - 1, or more while warming up."""
    # While warming up, a pass has fewer rows but more columns, which may be more nodes in all.
    return max(rows * _columns(width, n, rows) - 1 for rows in range(1, n)) if width else 0


def window_leaves(width: int, n: int) -> int:
    """Return the most leaves of any pass: W, or more while warming up (a single row is a chain)."""
    return max((_columns(width, n, rows) for rows in range(2, n)), default=1) if width else 0


def _columns(width: int, n: int, rows: int) -> int:
    return width + n - 1 - rows


class LookaheadWindow:
    """The rows of one window; `random_token` gives the tokens that warm-up begins with.

    `rows[0]` lacks column 0, which is the root.
    """

    def __init__(self, width: int, n: int, random_token: Callable[[], int]) -> None:
        self.n = n
        self.rows: list[list[int]] = [[random_token() for _ in range(width + n - 3)]]

    @property
    def columns(self) -> int:
        """How many columns there are, W once it is warm."""
        return len(self.rows[0]) + 1

    @property
    def is_warm(self) -> bool:
        """Whether the next pass yields n-grams."""
        return len(self.rows) == self.n - 1

    @property
    def n_nodes(self) -> int:
        """How many nodes `add_to` adds."""
        return len(self.rows) * self.columns - 1

    def fit(self, max_depth: int, max_nodes: int) -> bool:
        """Cut columns off at the right until the window fits; return whether any is left."""
        rows = len(self.rows)
        # Row r of column c stands c + r deep: the deepest node is at columns + rows - 2.
        columns = min(self.columns, max_depth - rows + 2, (max_nodes + 1) // rows)
        if columns < self.n - rows:  # each pass of the warm-up that is left drops one more
            return False
        self.rows = [row[: columns - (not number)] for number, row in enumerate(self.rows)]
        return True

    def add_to(self, builder: TreeBuilder) -> list[int]:
        """Add the window's nodes; return the last row's, by column (ROOT for the root itself)."""
        above = [ROOT]
        for token in self.rows[0]:
            # Hidden nodes: evaluated in the same mask as the rest, and never accepted.
            above.append(builder.add_hidden(above[-1], token))
        for row in self.rows[1:]:
            places = zip(above, row, strict=True)
            above = [builder.add_hidden(parent, token) for parent, token in places]
        return above

    def advance(self, root: int, outputs: Sequence[int]) -> list[tuple[int, ...]]:
        """Move on by one token; return the n-grams that were completed, by column.

        `root` is the token that column 0 of row 0 was, `outputs` the target's greedy token after
        each column.
        """
        if not self.is_warm:
            # The last row's answers become the next row. All drop column 0, whose place the root
            # has taken.
            self.rows = [*(row[1:] for row in self.rows), list(outputs[1:])]
            return []
        # Column 0 of row 0 is the root, so its n-gram is that of the text's last token.
        ngrams = list(zip([root, *self.rows[0]], *self.rows[1:], outputs, strict=True))
        below = [*self.rows[1:], list(outputs)]
        # Only row 0 drops a column: its first place is the root's, which is not kept here.
        self.rows = [below[0][1:], *below[1:]]
        return ngrams


# == The drafters ==================================================================================
#
# Lookahead decoding: each round evaluates two branches in one tree. The lookahead branch (`window`)
# runs Jacobi iterations on positions ahead and yields an n-gram a column; its nodes are never
# accepted. The verification branch (`pool`) drafts n-grams of the pool that continue the text,
# as point masses, so that the text is plain decoding's own at every temperature.
#
# Jacobi decoding: guess m tokens, and let the target correct all of them at once. "Accelerating
# Transformer Inference for Translation via Parallel Decoding", algorithm 1: greedy decoding is the
# system y_i = argmax p(. | y_1..y_{i-1}, x) for i = 1..m. The iteration evaluates every equation
# with the last iterate on its right side; it reaches the fixed point, greedy decoding's own text,
# after at most m steps, because step k has the first k tokens right, and sooner if guesses were
# right by luck.
#
# Here an iterate is a chain of point masses. Verification keeps its correct beginning and adds the
# target's own token, which is the fixed-point test; the greedy tokens after the rest are the next
# iterate, and new guesses fill it up to m behind. So at temperature 0 it is the paper's iteration,
# on a window that slides with the text; with sampling the iterates stay drafts, which verification
# accepts if the draw agrees, and the text is plain decoding's own.
#
# The length of a text is not known before. The paper's hybrid (algorithm 3) therefore iterates
# on the first h tokens only and decodes the rest plainly, and an iterate ends with its first end
# token: the tokens after it are never used.


_MAX_AHEAD = 4096


@dataclass(frozen=True, slots=True)
class _Proposal:
    """The proposal: the tree, the root's token, and the window's last row of nodes, if any."""

    tree: DraftTree
    root: int
    outputs: Sequence[int]


class LookaheadDrafter(Drafter):
    """Looks ahead with `width` columns for n-grams of `ngram` tokens; drafts from its pool.

    Width 0 does not look ahead: the pool then learns from the text alone. With `learn_text` every
    n-gram of prompt and answer goes into the pool too, in the order of the text; without it only
    the window's, as in the paper. A `guard` closes the window while it does not pay. `seed` fixes
    the tokens of the warm-up, drawn from the text so far. `guesses` and `guard` are this
    conversation's own; the store may be fed by others too, and belongs to the weights.
    """

    def __init__(
        self,
        *,
        ngram: int,
        width: int,
        guesses: Guesses,
        store: NgramStore,
        guard: WindowGuard | None = None,
        learn_text: bool = True,
        seed: int = 0,
        name: str = "lookahead",
    ) -> None:
        self.name = name
        self.reads_logits, self.finds_text = True, True
        self.max_nodes = window_nodes(width, ngram) + guesses.max_nodes
        self.max_leaves = max(1, window_leaves(width, ngram) + guesses.max_leaves)
        self._ngram, self._width, self._guesses = ngram, width, guesses
        self._store, self._guard, self._learns_text = store, guard, learn_text
        self._seed = seed
        self._random = random.Random(seed)
        self._window: LookaheadWindow | None = None
        self._proposal: _Proposal | None = None
        self._read: list[int] = []
        # n-grams that only the window has found so far, the latest at the end
        self._ahead: dict[tuple[int, ...], None] = {}

    def begin(self, tokens: Sequence[int]) -> None:
        """Start an answer with a new window; the pool goes on, but without tokens starts over."""
        self._proposal, self._window = None, None
        self._random = random.Random(self._seed)
        if not tokens:
            self._store.forget()
            self._guesses.forget()
            self._ahead.clear()
            self._read.clear()
            if self._guard is not None:
                self._guard.forget()
            return
        self._store.save()
        del self._read[common_prefix(self._read, tokens) :]
        self._learn(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return guesses from the pool, with the window beside them."""
        builder = TreeBuilder()
        window = self._window_for(request)
        beside = window.n_nodes if window else 0
        self._guesses.add_to(builder, self._store.pool, request, request.max_nodes - beside, beside)
        outputs = window.add_to(builder) if window else ()
        self._proposal = _Proposal(builder.build(), request.tokens[-1], outputs)
        return self._proposal.tree

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the window's n-grams and the new text into the pool, and move the window on."""
        proposal, self._proposal = self._proposal, None
        if proposal is not None and outcome.tree.extends(proposal.tree):
            # The counts of a guard need the pool as it was when the guesses were drafted.
            self._count(proposal, outcome)
            if self._window is not None:
                self._advance(self._window, proposal, outcome)
        else:
            self._window = None
        # Before the text goes into the pool, or every token would be found to be known.
        self._guesses.learn(self._store.pool, outcome.tokens, max(len(self._read), 1))
        self._learn(outcome.tokens)

    def rewind(self, length: int) -> None:
        """Forget guesses, and the window that went on from them; n-grams that they made stay."""
        if length < len(self._read):
            del self._read[length:]
            self._proposal, self._window = None, None

    # -- the window --------------------------------------------------------------------------------

    def _window_for(self, request: DraftRequest) -> LookaheadWindow | None:
        """Return the window to evaluate, cut to the room; it begins with room for all of it."""
        room = request.max_nodes - self._guesses.max_nodes  # guesses come first
        if self._width == 0 or (self._guard is not None and not self._guard.is_open):
            self._window = None
        elif self._window is None:
            has_room = request.max_depth >= self._width + self._ngram - 3
            if has_room and room >= window_nodes(self._width, self._ngram):
                self._window = LookaheadWindow(
                    self._width, self._ngram, lambda: self._random.choice(request.tokens)
                )
        elif not self._window.fit(request.max_depth, room):
            self._window = None
        return self._window

    def _advance(self, window: LookaheadWindow, proposal: _Proposal, outcome: RoundOutcome) -> None:
        # One argmax a column: rows need not lie side by side, and a copy of them would cost more.
        # The target's argmax at any temperature, as in the paper: a guess need not be a draw.
        greedy = [int(outcome.rows.logits(node + 1).argmax()) for node in proposal.outputs]
        for ngram in window.advance(proposal.root, greedy):
            if self._guard is not None and ngram[1:] not in self._store.pool.guesses(ngram[0]):
                self._ahead[ngram] = None
            self._store.add(ngram)
        while len(self._ahead) > _MAX_AHEAD:
            del self._ahead[next(iter(self._ahead))]

    def _count(self, proposal: _Proposal, outcome: RoundOutcome) -> None:
        if self._guard is None:
            return
        n_window = self._window.n_nodes if self._window else 0
        gained = self._gained(proposal.root, [outcome.tree.tokens[node] for node in outcome.path])
        self._guard.count(len(proposal.tree) - n_window, n_window, gained, outcome.n_new)

    def _gained(self, root: int, accepted: Sequence[int]) -> int:
        """Return how many of the accepted tokens only the window's n-grams knew."""
        # The longest prefix that another source knew is not the window's merit, only the rest is.
        path = tuple(accepted)
        for length in range(len(path), 0, -1):
            for rest in self._store.pool.guesses(root):
                if rest[:length] == path[:length] and (root, *rest) not in self._ahead:
                    return len(path) - length
        return len(path)

    # -- the text ----------------------------------------------------------------------------------

    def _learn(self, tokens: Sequence[int]) -> None:
        """Add the n-grams of the text that end after the part read before."""
        start = len(self._read)
        self._read.extend(tokens[start:])
        if self._learns_text:
            for ngram in self._store.add_text(tokens, start, self._ngram):
                self._ahead.pop(ngram, None)


class JacobiDrafter(Drafter):
    """Drafts the target's last guesses for the next `n` positions; the first are the text's.

    With `until` only the first so many tokens of an answer are drafted for (the paper's hybrid).
    """

    def __init__(
        self, *, n: int = 4, seed: int = 0, until: int | None = None, name: str = "jacobi"
    ) -> None:
        if n < 1:
            problem = "Jacobi decoding must iterate on at least 1 token (or use none)"
            raise OptionError(f"n is {n}: {problem}")
        if until is not None and until < 1:
            problem = "Jacobi decoding must iterate on the first token at least (or use none)"
            raise OptionError(f"until is {until}: {problem}")
        self._until, self._begun = until, 0
        self.reads_logits = True
        self.name, self.max_nodes, self._seed = name, n, seed
        self._random = random.Random(seed)
        self._iterate: list[int] = []
        self._tree: DraftTree | None = None

    def begin(self, tokens: Sequence[int]) -> None:
        """Start from new guesses."""
        self._random = random.Random(self._seed)
        self._iterate.clear()
        self._tree = None
        self._begun = len(tokens)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return the iterate as a chain, up to its first end token; empty after `until` tokens."""
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        if self._until is not None:
            count = min(count, self._begun + self._until - len(request.tokens))
        while len(self._iterate) < self.max_nodes:
            # Any guess is valid; tokens of the text are likelier to be right than others.
            self._iterate.append(self._random.choice(request.tokens))
        chain = self._iterate[: max(count, 0)]
        ends = (place for place, token in enumerate(chain, 1) if token in request.end_tokens)
        self._tree = DraftTree.chain(chain[: next(ends, len(chain))])
        return self._tree

    def observe(self, outcome: RoundOutcome) -> None:
        """Take the target's greedy tokens after the rejected guesses as the next iterate."""
        tree, self._tree = self._tree, None
        self._iterate.clear()
        kept = len(outcome.path)
        # Rows of another tree than the chain are no iterate of it.
        if tree is None or not outcome.tree.extends(tree):
            return  # a combinator verified something else
        if outcome.path != tuple(range(kept)) or kept > len(tree):
            return
        # Row 0 is the root's and row i + 1 that of guess i: after `kept` guesses row `kept` gave
        # the target's own token, and the rows behind it give the tokens that follow.
        behind = range(kept + 1, len(tree) + 1)
        self._iterate += (int(outcome.rows.logits(row).argmax()) for row in behind)


# == The builders of `lookahead(...)` and `jacobi(...)` ============================================


_NGRAM, _NGRAM_OF_TEXT = 5, 10
_PER_KEY, _MAX_KEYS = 16, 16384
_FEWEST_PATHS = 4
_PLANNED_NODES = 16
_YES_NO = ["yes", "no"]


def build_jacobi(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `jacobi(n=4, until=N, always=no)`."""
    options = options_of(expression)
    n, seed = options.integer("n", env.bounded(4)), options.integer("seed", 0)
    until = options.optional_integer("until")
    _require_room(expression, env, n, 1)
    name = str(expression)

    def start() -> Drafter:
        return JacobiDrafter(n=n, seed=seed, until=until, name=name)

    start().close()  # refuses impossible sizes
    return DrafterWeights(name, start, pace="paying")


def build_lookahead(
    expression: Expression, env: DraftEnvironment, build: BuildPart
) -> DrafterWeights:
    """Build `lookahead(window=15, ngram=5, guesses=15, pool=FILE)`; missing ones are planned.

    The plan reads the target's cost curve, measured by `specrun tune` on this machine or else a
    typical one. A pool with a file is shared by all conversations: each drafts from the text of
    all, and they are saved together. Without a file, or with save=no, every conversation fills a
    pool of its own.
    """
    options = options_of(expression)
    given = options.optional_integer("ngram")
    ngram = _NGRAM if given is None else given
    if not 2 <= ngram <= MAX_NGRAM:
        raise OptionError(f"{expression}: ngram is {ngram}: give 2 to {MAX_NGRAM}")
    curve = env.curve
    window, n_guesses = options.optional_integer("window"), options.optional_integer("guesses")
    width = planned_width(curve, ngram) if window is None else window
    if width < 0 or (n_guesses or 0) < 0:
        problem = "window and guesses count columns and n-grams: give 0 or more"
        raise OptionError(f"{expression}: {problem}")
    if given is None and width == 0 and n_guesses is None:
        # Without a window longer n-grams cost nothing, and tell copies from formulas.
        ngram = _NGRAM_OF_TEXT
    guesses = _guesses(curve, width, ngram, n_guesses)
    nodes = window_nodes(width, ngram) + guesses().max_nodes
    leaves = window_leaves(width, ngram) + guesses().max_leaves
    _require_room(expression, env, nodes, leaves)
    store = open_pool(expression, env, ngram)
    learn_text, seed = options.choice("text", _YES_NO, "yes") == "yes", options.integer("seed", 0)

    def start() -> Drafter:
        return LookaheadDrafter(
            ngram=ngram,
            width=width,
            guesses=guesses(),
            store=store.for_conversation(),
            guard=WindowGuard(curve) if window is None and width else None,
            learn_text=learn_text,
            seed=seed,
            name=str(expression),
        )

    return DrafterWeights(str(expression), start, [store], "paying")


def _guesses(
    curve: CostCurve, width: int, ngram: int, n_guesses: int | None
) -> Callable[[], Guesses]:
    """Return the source of a conversation's guesses: so many, or planned ones."""
    if n_guesses is not None:
        return functools.partial(LatestGuesses, n_guesses, ngram)
    leaves = max(width, _FEWEST_PATHS)
    return functools.partial(PlannedGuesses, curve, max_leaves=leaves, max_nodes=_most_nodes(curve))


def open_pool(expression: Expression, env: DraftEnvironment, ngram: int) -> NgramStore:
    """Return the store of an expression's n-gram pool: its options `pool`, `save` and bounds."""
    options = options_of(expression)
    path = options.optional("pool")
    keep = options.choice("save", _YES_NO, "yes") == "yes"
    if path is None and not keep:
        raise OptionError(f"{expression}: save=no is about a pool's file: name it with pool=FILE")
    return open_store(
        None if path is None else Path(path).expanduser(),
        env.target.vocabulary,
        n=ngram,
        per_key=options.integer("per_key", _PER_KEY),
        max_keys=options.integer("max_keys", _MAX_KEYS),
        keep=keep,
    )


def _most_nodes(curve: CostCurve) -> int:
    """Return how many nodes are worth drafting if every one of them is sure to be accepted."""
    return max(range(1, _PLANNED_NODES + 1), key=lambda n: (n + 1) / curve.seconds(n + 1))


def _require_room(expression: Expression, env: DraftEnvironment, nodes: int, leaves: int) -> None:
    """Raise if no evaluation could hold a proposal of this size."""
    check_leaves(expression, leaves, "lower window or guesses")
    for limit, name, advice in (
        (env.context.n_batch, "a batch", "the batch size (-b)"),
        (env.n_ctx, "a context", "the context size (-c)"),
    ):
        if nodes + 1 > limit:
            raise OptionError(
                f"{expression} evaluates up to {nodes + 1} tokens at once, which do not fit {name} "
                f"of {limit}: lower its sizes, or raise {advice}"
            )
