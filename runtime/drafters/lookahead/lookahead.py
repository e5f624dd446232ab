"""Lookahead decoding (Fu et al. 2024) and Jacobi decoding (Santilli et al. 2023).

Lookahead decoding: each round evaluates two branches in one tree. The lookahead branch (`window`)
runs Jacobi iterations on positions ahead and yields an n-gram a column; its nodes are never
accepted. The verification branch (`guesses`) drafts n-grams of the pool that continue the text, as
point masses, so that the text is plain decoding's own at every temperature.

Jacobi decoding: guess m tokens, and let the target correct all of them at once. "Accelerating
Transformer Inference for Translation via Parallel Decoding", algorithm 1: greedy decoding is the
system y_i = argmax p(. | y_1..y_{i-1}, x) for i = 1..m. The iteration evaluates every equation with
the last iterate on its right side; it reaches the fixed point, greedy decoding's own text, after at
most m steps, because step k has the first k tokens right, and sooner where guesses were right by
luck.

Here an iterate is a chain of point masses. Verification keeps its correct beginning and adds the
target's own token, which is the fixed-point test; the greedy tokens after the rest are the next
iterate, and new guesses fill it up to m behind. So at temperature 0 it is the paper's iteration, on
a window that slides with the text; with sampling the iterates stay drafts, which verification
accepts where the draw agrees, and the text is plain decoding's own.

How long a text becomes nobody knows before. The paper's hybrid (algorithm 3) therefore iterates on
the first h tokens only and decodes the rest plainly, and an iterate ends with its first end token:
what would stand behind it is never said.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.bindings.errors import OptionError
from specrun.runtime.drafter import Drafter, DraftRequest, RoundOutcome
from specrun.runtime.drafters.lookahead.guesses import Guesses
from specrun.runtime.drafters.lookahead.plan import WindowGuard
from specrun.runtime.drafters.lookahead.pool_store import NgramStore
from specrun.runtime.drafters.lookahead.window import LookaheadWindow, window_leaves, window_nodes
from specrun.runtime.text import common_prefix
from specrun.runtime.tree import DraftTree, TreeBuilder

_MAX_AHEAD = 4096


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What was proposed: the tree, the root's token, and the window's last row of nodes, if any."""

    tree: DraftTree
    root: int
    outputs: Sequence[int]


class LookaheadDrafter(Drafter):
    """Looks ahead with `width` columns for n-grams of `ngram` tokens; drafts what its pool knows.

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
        if width < 0 or ngram < 2:
            raise OptionError(
                f"window={width} with ngram={ngram}: give window 0 or more and ngram 2 or more"
            )
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
            # The counts of a guard need the pool as it was when the
            # guesses were drafted: before learning.
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
        """Add the n-grams of the text that end after what was read before."""
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
        # the target's own token, and the rows behind it say what follows.
        behind = range(kept + 1, len(tree) + 1)
        self._iterate += (int(outcome.rows.logits(row).argmax()) for row in behind)
