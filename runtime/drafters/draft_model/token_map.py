"""Token-level intersection: which tokens of two vocabularies are the same bytes.

Timor et al. 2025 (arXiv 2502.05202, algorithm 4): a drafter of another vocabulary drafts from its
law restricted to the tokens that both have, renormalised. Whatever law is drawn from, acceptance
keeps the target's, so this is exact; what it costs is the drafter's mass on tokens that the target
lacks. Tokens of the target that the drafter lacks, which the target itself may say, are spelled for
it with tokens of its own: a committed token may be several of the drafter's, so that its cells are
counted apart from the tokens. What it drafts are shared tokens, one cell each, and trees grow as
those of any draft model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import PairError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.drafters.draft_model.tree_state import DraftTreeState
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.transform import Logits

_FREQUENT = 100.0  # tokens stand about in the order of their frequency: weights are 1 / (100 + id)


class TokenMap:
    """The tokens that a target's vocabulary and a drafter's share, by their exact bytes.

    Control tokens are the same where their texts are. Raises `PairError` where nothing is shared.
    `n_shared` counts tokens; `coverage` is their share of the target's ordinary tokens, frequent
    ones weighing more (Zipf's law over their ids).
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        self._target, self._draft = target, draft
        ours, theirs = _by_content(target), _by_content(draft)
        pairs = [(token, theirs[content]) for content, token in ours.items() if content in theirs]
        if not pairs:
            raise PairError("the vocabularies of target and drafter have no token in common")
        self.n_shared = len(pairs)
        own, other = np.array(sorted(pairs), np.intp).T
        # Of each of the target's tokens the drafter's, and where there is none any.
        self._source = np.zeros(target.size, np.intp)
        self._source[own] = other
        self._lacking = np.ones(target.size, np.bool_)
        self._lacking[own] = False
        self._ids: dict[int, tuple[int, ...]] = {
            int(token): (int(same),) for token, same in zip(own, other, strict=True)
        }
        self._pieces = {
            content: token for (is_control, content), token in theirs.items() if not is_control
        }
        self._longest = max(map(len, self._pieces), default=0)
        weights = 1.0 / (_FREQUENT + np.arange(target.size))
        ordinary = np.array([token for (control, _), token in ours.items() if not control], np.intp)
        shared = ordinary[~self._lacking[ordinary]]
        self.coverage = float(weights[shared].sum() / weights[ordinary].sum())
        self.first = (draft.bos,) if draft.adds_bos and draft.bos is not None else ()
        """What the drafter reads before any text."""
        if target.bos is not None and self.first:
            self._ids[target.bos] = self.first

    def row(self, logits: Logits) -> npt.NDArray[np.float32]:
        """Return the drafter's logits by the target's ids [target vocab], -inf where none is."""
        found: npt.NDArray[np.float32] = np.take(logits, self._source).astype(
            np.float32, copy=False
        )
        found[self._lacking] = -np.inf
        return found

    def spelled(self, token: int) -> tuple[int, ...]:
        """Return the drafter's tokens, at least one, for a token of the target."""
        found = self._ids.get(token)
        if found is None:
            found = self._ids[token] = self._spell(token)
        return found

    def _spell(self, token: int) -> tuple[int, ...]:
        content = self._target.piece(token) or self._target.label(token).encode()
        ids: list[int] = []
        place = 0
        while place < len(content):
            # The longest first, as tokenizers do; a byte that it lacks is left out.
            ends = range(min(len(content), place + self._longest), place, -1)
            end = next((end for end in ends if content[place:end] in self._pieces), 0)
            if end:
                ids.append(self._pieces[content[place:end]])
            place = max(end, place + 1)
        stand_in = self._draft.eos if self._draft.eos is not None else 0
        return tuple(ids) or (stand_in,)


def _by_content(vocabulary: Vocabulary) -> dict[tuple[bool, bytes], int]:
    """Return the tokens by what they stand for, and whether that is a control token's text.

    Of several that stand for the same bytes the one that is not a bare byte of a fallback, and
    among such the first.
    """
    found: dict[tuple[bool, bytes], int] = {}
    for token in _bytes_last(vocabulary):
        piece = vocabulary.piece(token)
        content = (False, piece) if piece else (True, vocabulary.label(token).encode())
        if content[1]:
            found.setdefault(content, token)
    return found


def _bytes_last(vocabulary: Vocabulary) -> Iterable[int]:
    tokens = range(vocabulary.size)
    return sorted(tokens, key=lambda token: (vocabulary.is_byte(token), token))


class SpelledModelState(DraftModelState):
    """Evaluates committed tokens of the target as the drafter's own, and maps its rows back.

    `cached` are the target's tokens; `cells(n)` says how many cells the first n of them have.
    """

    def __init__(self, context: Context, tokens: TokenMap) -> None:
        super().__init__(context, target_vocab_size=context.model.vocabulary.size)
        self._map, self._cuts_rows = tokens, True
        self._ends: list[int] = []  # of cached tokens, and maybe of some that were cut since

    def cells(self, length: int) -> int:
        """Return how many cells hold the first `length` cached tokens."""
        while len(self._ends) < length:  # drafted tokens, one cell each
            self._ends.append(1 + (self._ends[-1] if self._ends else len(self._map.first)))
        return self._ends[length - 1] if length else 0

    def room(self, tokens: Sequence[int]) -> int:
        """Return how many cells are left behind a text whose first tokens are cached."""
        n_cached = len(self.cached)
        new = sum(len(self._map.spelled(token)) for token in tokens[n_cached:])
        start = 0 if n_cached else len(self._map.first)
        return self.context.n_ctx - self.cells(n_cached) - start - new

    def known(self, token: int) -> int:
        """Return the drafter's token for a shared one."""
        return self._map.spelled(token)[0]

    def all_known(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return what `known` makes of each."""
        return [*map(self.known, tokens)]

    def shared(self, logits: Logits) -> Logits:
        """Return a row by the target's ids, -inf where the drafter has no such token."""
        return self._map.row(logits)

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens after the cached ones; return the last one's logits [target vocab]."""
        start = self.cells(len(self.cached))
        del self._ends[len(self.cached) :]
        spelled = [self._map.spelled(token) for token in tokens]
        if not self.cached and spelled[0] != self._map.first:
            spelled[0] = (*self._map.first, *spelled[0])
        ids = [token for several in spelled for token in several]
        n_batch = self.context.n_batch
        self._changing = True
        for begin in range(0, len(ids), n_batch):
            piece = ids[begin : begin + n_batch]
            self.batch.fill_chain(piece, start + begin, (self.main,), 1)
            rows = self.context.decode(self.batch)
        self._ends += [*accumulate(map(len, spelled), initial=start)][1:]
        self.cached.extend(tokens)
        self._changing = False
        return self.shared(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate a token after the cached ones; return its logits [target vocab]."""
        return self.feed((token,))

    def can_draw_on(self, params: SamplingParams) -> bool:
        """Return False: laws are drawn from by other numbers than the rows'."""
        return False

    def feed_likeliest(self, token: int, most: int, ends: frozenset[int]) -> list[int] | None:
        """Return None: compiled code reads the drafter's own ids."""
        return None


class SpelledTreeState(SpelledModelState, DraftTreeState):
    """The same, and below the last committed token the nodes of a growing tree."""

    def __init__(self, context: Context, tokens: TokenMap) -> None:
        super().__init__(context, tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed; drop the others."""
        del self._ends[len(self.cached) :]  # of tokens that were cut: the new ones have one cell
        super().keep(tokens)
