"""Vocabularies of target and draft model: equal, shared in part, or met as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import PairError
from specrun.bindings.models.model import Model
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafters.draft_model.source import DraftModelSource
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.sampling import SamplingParams
from specrun.runtime.laws.transform import Logits, greedy_token
from specrun.runtime.models.pairing import check_can_draft, check_vocabularies
from specrun.runtime.round.drafter import Drafter, DraftRequest
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.eagle2 import DynamicShape
from specrun.runtime.trees.topology import Topology
from specrun.runtime.trees.tree import DraftTree

# == Token-level intersection: tokens of two vocabularies with the same bytes ======================
#
# Timor et al. 2025 (arXiv 2502.05202, algorithm 4): a drafter of another vocabulary drafts from its
# distribution restricted to the tokens that both have, renormalised. Whatever distribution is drawn
# from, acceptance keeps the target's, so this is exact; the cost is the drafter's mass on tokens
# that the target lacks. Tokens of the target that the drafter lacks, which the target itself may
# choose, are spelled for it with tokens of its own: a committed token may be several of the
# drafter's, so that its cells are counted apart from the tokens. It drafts shared tokens, one cell
# each, and trees grow as those of any draft model.


_FREQUENT = 100.0  # tokens stand about in the order of their frequency: weights are 1 / (100 + id)


class TokenMap:
    """The tokens that a target's vocabulary and a drafter's share, by their exact bytes.

    Control tokens are the same if their texts are. Raises `PairError` if nothing is shared.
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
        """The tokens that the drafter reads before any text."""
        if target.bos is not None and self.first:
            self._ids[target.bos] = self.first

    def row(self, logits: Logits) -> npt.NDArray[np.float32]:
        """Return the drafter's logits by the target's ids [target vocab], -inf if none is."""
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
    """Return the tokens by their texts, and whether each is a control token's.

    Of several that stand for the same bytes the one that is not a bare byte of a fallback, and
    among such the first.
    """
    found: dict[tuple[bool, bytes], int] = {}
    tokens = range(vocabulary.size)
    for token in sorted(tokens, key=lambda token: (vocabulary.is_byte(token), token)):
        piece = vocabulary.piece(token)
        content = (False, piece) if piece else (True, vocabulary.label(token).encode())
        if content[1]:
            found.setdefault(content, token)
    return found


class SpelledModelSource(DraftModelSource):
    """Evaluates committed tokens of the target as the drafter's own, and maps its rows back.

    `cached` are the target's tokens; `cells(n)` is the number of cells of the first n.
    """

    def __init__(self, context: Context, shape: Topology | DynamicShape, tokens: TokenMap) -> None:
        super().__init__(context, shape, target_vocab_size=context.model.vocabulary.size)
        self._map, self._cuts_rows, self._own_size = tokens, True, 0  # all tokens are mapped
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

    def cut_row(self, logits: Logits) -> Logits:
        """Return a row by the target's ids, -inf if the drafter has no such token."""
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
        return self.cut_row(rows.logits(0))

    def feed_one(self, token: int) -> Logits:
        """Evaluate a token after the cached ones; return its logits [target vocab]."""
        return self.feed((token,))

    def keep(self, tokens: Sequence[int]) -> None:
        """Keep the nodes that spell the beginning of `tokens`, now committed; drop the others."""
        del self._ends[len(self.cached) :]  # of tokens that were cut: the new ones have one cell
        super().keep(tokens)


# == Pairs of vocabularies =========================================================================


_NOTHING = 0.005  # of a text's tokens
_ENOUGH = 0.5  # of the target's tokens, by frequency: below it a drafter is heard better as text


@dataclass(frozen=True, slots=True)
class DraftPair:
    """A target's vocabulary and a drafter's part of it.

    `tokens` is None if both have the same ids; `by_text`: nothing but text is passed on.
    `remark` is a note for the user if the vocabulary is not the target's, else "".
    """

    target_size: int
    tokens: TokenMap | None = None
    by_text: bool = False
    remark: str = ""

    @staticmethod
    def of(target: Model, draft: Model, expression: Expression) -> DraftPair:
        """Return the way that `vocabulary=auto|same|tokens|text` of a drafter expression chooses.

        "auto" takes the same ids if they mean the same, shared tokens if most of the
        target's are shared, and text otherwise. Raises `PairError` if nothing is in common, or
        the vocabulary is another one although "same" was given, and `UnsupportedModelError`.
        """
        check_can_draft(draft)
        ways = ["auto", "same", "tokens", "text"]
        options = options_of(expression)
        way = options.choice("vocabulary", ways, "auto")
        size = target.vocabulary.size
        if way in ("auto", "same"):
            try:
                check_vocabularies(target, draft)
            except PairError:
                if way == "same":
                    raise
            else:
                return DraftPair(size)
        try:
            tokens = TokenMap(target.vocabulary, draft.vocabulary)
        except PairError as error:
            raise PairError(f"{draft.path} cannot draft for {target.path}: {error}") from None
        other = f"{draft.path} has another vocabulary"
        if way == "text" or (way == "auto" and tokens.coverage < _ENOUGH):
            remark = f"{other}: its text is tokenized again, which costs some of every draft"
            return DraftPair(size, by_text=True, remark=f"{remark} (vocabulary=text)")
        shared = f"it drafts by the {tokens.n_shared:,} of {size:,} tokens that both have"
        lacking = 1.0 - tokens.coverage  # by frequency
        cost = f"; drafts end at the about {lacking:.0%} of a text's tokens that it lacks"
        cost = cost if lacking > _NOTHING else ", nearly all that texts are made of"
        return DraftPair(size, tokens, remark=f"{other}: {shared}{cost} (vocabulary=tokens)")

    def source(self, context: Context, shape: Topology | DynamicShape) -> DraftModelSource:
        """Return the rows of a drafter of this pair."""
        if self.tokens is None:
            return DraftModelSource(context, shape, target_vocab_size=self.target_size)
        return SpelledModelSource(context, shape, self.tokens)


# == String-level drafts: another vocabulary's text in the target's tokens =========================
#
# Timor et al. 2025 (arXiv 2502.05202, algorithm 2, string-level exact match). The text so far is
# tokenized for the drafter, it goes on greedily, and its text is tokenized for the target.
# These tokens are point masses: nothing is drawn, so no distribution has to be carried from one
# vocabulary to the other, and the text stays plain decoding's own at every temperature. The two
# vocabularies only have to spell the same text.


_GREEDY = SamplingParams(temperature=0.0)
_TAIL = 256  # bytes that are tokenized anew each round; earlier ones stay as they were
_CONTEXT = 4  # tokens before the draft that its tokens are made with


class RetokenisedDrafter(Drafter):
    """Drafts `num_draft_tokens` of the drafter's own tokens in a row, as tokens of the target.

    It need not hear of other texts and rejected guesses: `propose` compares text and cache.
    """

    def __init__(
        self,
        context: Context,
        target: Vocabulary,
        *,
        num_draft_tokens: int = 5,
        name: str = "draft",
    ) -> None:
        own, chain = context.model.vocabulary, Topology.chain(num_draft_tokens)
        self._model = DraftModelSource(context, chain, target_vocab_size=own.size)
        self.name, self.max_nodes = name, num_draft_tokens
        self.n_params, self.depth_params = self._model.n_params, self._model.depth_params
        self._target, self._own = target, own
        self._reader = TextReader(target, own)

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; none if the text ends within a character."""
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        known = self._reader.read(request.tokens)
        room = self._model.room(known or ()) + 1
        if known is None or min(count, room) < 1:
            return DraftTree()
        said = self._go_on(known, min(count, room))
        tokens = tokens_after(self._target, request.tokens[-_CONTEXT:], said)
        return DraftTree.chain(tokens[:count])

    def _go_on(self, known: list[int], count: int) -> bytes:
        """Return the drafter's next text, cut to whole characters."""
        model, said = self._model, list[int]()
        model.rewind(common_prefix(model.cached, known))
        row = model.row_after(known)
        ends = self._own.end_of_generation
        while True:
            token = greedy_token(row, _GREEDY)
            if token in ends:
                break
            said.append(token)
            if len(said) == count:
                break
            row = model.feed_one(token)
        return whole_characters(b"".join(self._own.pieces(said)))

    @property
    def native_seconds(self) -> float:
        """Time inside the draft model's evaluations."""
        return self._model.native_seconds

    def close(self) -> None:
        """Free the context."""
        self._model.close()


class TextReader:
    """Tokenizes a growing text: only its last part anew, so that a round's cost is bounded.

    The text comes as tokens of one vocabulary and goes as tokens of the other.
    """

    def __init__(self, source: Vocabulary, vocabulary: Vocabulary) -> None:
        self._source, self._vocabulary = source, vocabulary
        self._forget()

    def _forget(self) -> None:
        first = self._vocabulary.bos
        self._settled = [first] if self._vocabulary.adds_bos and first is not None else []
        self._read: list[int] = []  # the tokens in `_tail` or before it
        self._tail = b""
        self._changing = False  # an interrupt leaves it set: read tokens are then forgotten

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the text's tokens in the other vocabulary; None if it ends in a character.

        The common part with the text before is not tokenized again, but for its end.
        """
        n = len(self._read)
        if self._changing or list(tokens[:n]) != self._read:
            self._forget()
            n = 0
        self._changing = True
        for token, piece in zip(tokens[n:], self._source.pieces(tokens[n:]), strict=True):
            if piece:
                self._tail += piece
            else:
                self._mark(token)
        self._read += tokens[n:]
        is_whole = whole_characters(self._tail) == self._tail
        ids = self._vocabulary.tokenize_within(self._tail) if is_whole else []
        whole = [*self._settled, *ids]
        if len(self._tail) > 2 * _TAIL:
            self._settle(ids)
        self._changing = False
        if not is_whole:
            return None
        return whole or [self._vocabulary.eos or 0]

    def _mark(self, token: int) -> None:
        """Read a control token, which no text is: as the same one, or as its name spelled out."""
        self._settled += self._vocabulary.tokenize_within(self._tail)
        self._tail = b""
        if token != self._source.bos:  # the drafter's own is there already, if it needs one
            name = self._source.label(token)
            self._settled += self._vocabulary.tokenize(name, add_special=False, parse_special=True)

    def _settle(self, ids: list[int]) -> None:
        """Keep the tokens of all but the last part, up to where a word or a line begins."""
        place, kept = 0, 0
        for index, piece in enumerate(self._vocabulary.pieces(ids)):
            if place > len(self._tail) - _TAIL:
                break
            if piece[:1] in b" \n" and whole_characters(self._tail[:place]) == self._tail[:place]:
                kept, end = index, place
            place += len(piece)
        if kept:
            self._settled += ids[:kept]
            self._tail = self._tail[end:]


def whole_characters(text: bytes) -> bytes:
    """Return the text without a character at its end that is not whole; others stay as they are."""
    for length in range(1, min(4, len(text)) + 1):
        first = text[-length]
        if first < 0x80:
            return text
        if first >= 0xC0:
            needed = 2 + (first >= 0xE0) + (first >= 0xF0)
            return text if needed <= length else text[:-length]
    return text


def tokens_after(vocabulary: Vocabulary, before: Sequence[int], text: bytes) -> list[int]:
    """Return the tokens of a text that follows some tokens.

    They are made together with those, as a tokenizer would, where that leaves those as they are.
    """
    if not text:
        return []
    known = b"".join(vocabulary.pieces(before))
    together = vocabulary.tokenize_within(known + text)
    if together[: len(before)] == list(before):
        return together[len(before) :]
    return vocabulary.tokenize_within(text)
