"""String-level drafts: what a drafter of another vocabulary says as text, in the target's tokens.

Timor et al. 2025 (arXiv 2502.05202, algorithm 2, string-level exact match). The text so far is
tokenized for the drafter, it goes on greedily, and what it says is tokenized for the target. These
tokens are point masses: nothing is drawn, so no law has to be carried from one vocabulary to the
other, and the text stays plain decoding's own at every temperature. It asks nothing of the two
vocabularies but that they spell the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrun.bindings.contexts.context import Context
from specrun.bindings.errors import OptionError
from specrun.bindings.models.vocabulary import Vocabulary
from specrun.runtime.drafter import DraftRequest, RoundOutcome
from specrun.runtime.drafters.draft_model.model_drafter import ContextDrafter
from specrun.runtime.drafters.draft_model.state import DraftModelState
from specrun.runtime.sampling import SamplingParams
from specrun.runtime.text import common_prefix
from specrun.runtime.transform import greedy_token
from specrun.runtime.tree import DraftTree

_GREEDY = SamplingParams(temperature=0.0)
_TAIL = 256  # bytes that are tokenized anew each round; what is before them stays as it was
_CONTEXT = 4  # tokens before the draft that its tokens are made with


class RetokenisedDrafter(ContextDrafter):
    """Drafts `num_draft_tokens` of the drafter's own tokens in a row, as tokens of the target."""

    def __init__(
        self,
        context: Context,
        target: Vocabulary,
        *,
        num_draft_tokens: int = 5,
        name: str = "draft",
    ) -> None:
        if num_draft_tokens < 1:
            raise OptionError(
                f"n is {num_draft_tokens}: a draft model must draft at least 1 token (or use none)"
            )
        own = context.model.vocabulary
        self._state = DraftModelState(context, target_vocab_size=own.size)
        super().__init__(self._state, name=name)
        self.max_nodes = num_draft_tokens
        self._target, self._own = target, own
        self._reader = TextReader(target, own)

    def begin(self, tokens: Sequence[int]) -> None:
        """Do nothing: `propose` asks the text itself what of the cache is still true."""

    def rewind(self, length: int) -> None:
        """Do nothing: see `begin`."""

    def observe(self, outcome: RoundOutcome) -> None:
        """Do nothing: see `begin`."""

    def propose(self, request: DraftRequest) -> DraftTree:
        """Return a chain; none where the text ends within a character."""
        count = min(self.max_nodes, request.max_depth, request.max_nodes)
        known = self._reader.read(request.tokens)
        room = self._context.n_ctx - len(known or ()) + 1
        if known is None or min(count, room) < 1:
            return DraftTree()
        said = self._go_on(known, min(count, room))
        tokens = tokens_after(self._target, request.tokens[-_CONTEXT:], said)
        return DraftTree.chain(tokens[:count])

    def _go_on(self, known: list[int], count: int) -> bytes:
        """Return what the drafter says next, cut to whole characters."""
        state, said = self._state, list[int]()
        state.rewind(min(common_prefix(state.cached, known), len(known) - 1))
        row = state.feed(known[len(state.cached) :])
        ends = self._own.end_of_generation
        while True:
            token = greedy_token(row, _GREEDY)
            if token in ends:
                break
            said.append(token)
            if len(said) == count:
                break
            row = state.feed_one(token)
        return whole_characters(b"".join(self._own.pieces(said)))


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
        self._read: list[int] = []  # what stands in `_tail` or before it
        self._tail = b""
        self._changing = False  # an interrupt leaves it set: what was read is then forgotten

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the text's tokens in the other vocabulary; None where it ends in a character.

        What a text shares with the one before is not tokenized again, but for its end.
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
        if token != self._source.bos:  # the drafter's own is there already, if it wants one
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
