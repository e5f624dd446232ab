"""N-gram distributions: smoothed counts to draw from (Leviathan et al. 2023, bigram drafters)."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import OptionError
from specrun.runtime.drafters.environment import BuildPart, DraftEnvironment
from specrun.runtime.drafters.growing.drafter import GrowingDrafter
from specrun.runtime.drafters.growing.source import HighestLogits, NodeRows, Source
from specrun.runtime.drafters.lookahead.pool import load_pool
from specrun.runtime.drafters.retrieval import read_reference_tokens
from specrun.runtime.drafters.tree_options import ChainOptions
from specrun.runtime.grammar import GrammarState
from specrun.runtime.language import Expression, options_of
from specrun.runtime.laws.law import FloatArray, IdArray, Law
from specrun.runtime.laws.transform import Logits
from specrun.runtime.round.drafter import DrafterWeights, DraftRequest, RoundOutcome
from specrun.runtime.round.text import common_prefix
from specrun.runtime.trees.tree import ROOT

# == N-gram counts: of a growing text, which can be cut back, and of fixed texts ===================
#
# `GrowingCounts` are hash tables, quick to change; `TextCounts` a trie in sorted arrays, which
# holds millions of n-grams in some bytes each and is searched by bisection. Both hold the tokens
# after a context, with their counts.


MAX_ORDER = 5
Followers = tuple[IdArray, FloatArray]
"""Tokens that followed a context, ascending, and how often each did."""

_NOTHING: Followers = (np.zeros(0, np.intp), np.zeros(0))


class TextCounts:
    """The n-grams of texts, of 1 to `order` tokens; none reaches from one text into the next.

    Level j of the trie has an entry for each different j-gram, sorted by the number of its first
    j - 1 tokens on the level above and then by its last token: so the tokens after a context are a
    stretch of a level, and a context is found by a bisection a token.
    """

    def __init__(self, texts: Sequence[Sequence[int]], order: int, vocab_size: int) -> None:
        self.order, self._size = order, vocab_size
        self._keys: list[npt.NDArray[np.int64]] = []
        self._counts: list[FloatArray] = []
        tokens = np.array([token for text in texts for token in text], np.int64)
        # How many tokens of its text come after each.
        left = np.concatenate([np.arange(len(text))[::-1] for text in texts] or [tokens])
        starts = np.arange(len(tokens))
        above = np.zeros(len(tokens), np.int64)
        for length in range(1, order + 1):
            inside = left[starts] >= length - 1
            starts, above = starts[inside], above[inside]
            # An entry's number and a token: two numbers in one, below 2^62 for any text in memory.
            packed = above * vocab_size + tokens[starts + length - 1]
            keys, places, counts = np.unique(packed, return_inverse=True, return_counts=True)
            self._keys.append(keys)
            self._counts.append(counts.astype(np.float64))
            above = places.astype(np.int64)
        self._all: Followers = self._keys[0].astype(np.intp), self._counts[0]

    def __len__(self) -> int:
        """Return how many different n-grams there are, of all lengths."""
        return sum(map(len, self._keys))

    def followers(self, context: Sequence[int]) -> Followers:
        """Return the tokens after a context of fewer than `order` tokens; all for an empty one.

        Of the empty context the array of tokens is the same object while they are the same.
        """
        if not context:
            return self._all
        entry = 0
        for level, token in enumerate(context):
            keys = self._keys[level]
            key = entry * self._size + token
            entry = int(keys.searchsorted(key))
            if entry == len(keys) or keys[entry] != key:
                return _NOTHING
        keys, counts = self._keys[len(context)], self._counts[len(context)]
        start, end = keys.searchsorted((entry * self._size, (entry + 1) * self._size))
        return (keys[start:end] - entry * self._size).astype(np.intp), counts[start:end]


class GrowingCounts:
    """The n-grams of one text of 1 to `order` tokens, which grows and is cut back at its end."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.tokens: list[int] = []
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}
        # All tokens of the text, sorted: every distribution needs them, and a round changes few.
        self._all: Followers | None = None
        # Set while tokens and counts change: an interrupt leaves it set, and all is counted anew.
        self._changing = False

    def begin(self, tokens: Sequence[int]) -> None:
        """Turn to another text; the common part with the one before stays counted."""
        shared = common_prefix(self.tokens, tokens)
        if self._changing:
            self.tokens, self._followers, self._all, shared = [], {}, None, 0
        self.cut(shared)
        self.extend(tokens[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        """Count the n-grams that end in these tokens, which go on the text."""
        text, table = self.tokens, self._followers
        self._changing = True
        for token in tokens:
            end = len(text)
            for length in range(min(self.order, end + 1)):
                found = table.setdefault(tuple(text[end - length :]), {})
                found[token] = found.get(token, 0) + 1
            text.append(token)
            self._note(token, 1.0)
        self._changing = False

    def cut(self, length: int) -> None:
        """Take back the tokens from `length` on, and the n-grams that end in them."""
        text, table = self.tokens, self._followers
        self._changing = True
        while len(text) > length:
            token = text.pop()
            end = len(text)
            for size in range(min(self.order, end + 1)):
                context = tuple(text[end - size :])
                found = table[context]
                if found[token] > 1:
                    found[token] -= 1
                elif len(found) > 1:
                    del found[token]
                else:
                    del table[context]
            self._note(token, -1.0)
        self._changing = False

    def followers(self, context: Sequence[int]) -> Followers:
        """Return the tokens after a context of fewer than `order` tokens; all for an empty one."""
        if not context:
            if self._all is None:
                self._all = _sorted(self._followers.get((), {}))
            return self._all
        return _sorted(self._followers.get(tuple(context), {}))

    def _note(self, token: int, change: float) -> None:
        """Change a token's own count; one that comes or goes changes the array of all."""
        if self._all is None:
            return
        ids, counts = self._all
        place = int(ids.searchsorted(token))
        if place < len(ids) and ids[place] == token and counts[place] + change > 0.0:
            counts[place] += change
        else:
            self._all = None


def _sorted(found: Mapping[int, int]) -> Followers:
    if not found:
        return _NOTHING
    tokens = sorted(found)
    return np.array(tokens, np.intp), np.array([found[token] for token in tokens], np.float64)


# == Witten-Bell smoothing (Witten and Bell 1991) ==================================================
#
# With c(h w) how often token w followed the context h, c(h) = sum_w c(h w) and N(h) how many
# different tokens did,
#
#     P(w | h) = (c(h w) + N(h) P(w | h')) / (c(h) + N(h))
#
# where h' is h without its first token (Chen and Goodman 1999, equation 17, the interpolated form
# of Jelinek and Mercer): a context in which many things followed leaves more to the shorter one.
# The text's own counts are interpolated with those of files in the same way, as if files were a
# still shorter context: P(w | nothing) of the text is smoothed by the file's P(w | h), a cache
# model. At the bottom are relative frequencies; the distribution has mass on tokens that were
# counted, which is enough to be drawn from.


_NO_IDS = np.zeros(0, np.intp)


Counts = TextCounts | GrowingCounts


class NgramLaw:
    """The smoothed distribution of several counts: `sources` by rising length of context."""

    def __init__(self, sources: Sequence[Counts]) -> None:
        self._sources = sources
        # The tokens that any source has, and where each source's are among them. They are worked
        # out again when a source has other tokens: most rounds bring none.
        self._known: list[IdArray] = []
        self._ids = _NO_IDS
        self._places: list[IdArray] = []

    def after(self, tokens: Sequence[int]) -> Law | None:
        """Return the distribution of the next token over counted tokens; None if there are none."""
        self._align()
        if not len(self._ids):
            return None
        probs, is_empty = np.zeros(len(self._ids)), True
        for source, all_places in zip(self._sources, self._places, strict=True):
            for length in range(min(source.order, len(tokens) + 1)):
                followers, counts = source.followers(tokens[len(tokens) - length :])
                if not len(followers):
                    break  # a longer context was not seen either
                places = all_places if length == 0 else self._ids.searchsorted(followers)
                total = float(counts.sum())
                if not is_empty:
                    n_different = float(len(followers))
                    total += n_different
                    probs *= n_different / total
                probs[places] += counts / total
                is_empty = False
        return Law(probs, self._ids)

    def _align(self) -> None:
        known = [source.followers(())[0] for source in self._sources]
        if len(known) == len(self._known) and all(map(operator.is_, known, self._known)):
            return
        ids = known[0] if len(known) == 1 else np.unique(np.concatenate([_NO_IDS, *known]))
        self._ids, self._places = ids, [ids.searchsorted(tokens) for tokens in known]
        self._known = known


# == The source of rows ============================================================================


class NgramSource(Source):
    """Counts of the text so far, and of `sources`, as rows of the tokens that were counted.

    Penalties and biases of the target are not applied: they would cost the whole vocabulary, and
    their changes are tested all the same.
    """

    few_tokens = True

    def __init__(self, order: int, sources: Sequence[Counts] = ()) -> None:
        self._text = GrowingCounts(order)
        self._law = NgramLaw([*sources, self._text])
        self._order = max(order, *(source.order for source in sources), 1)
        self._last: list[int] = []  # the text's last tokens
        self._place: GrammarState | None = None
        self._keeps_rows = False  # whether a rule reads whole rows of the draft
        self._paths: list[list[int]] = []

    def begin(self, tokens: Sequence[int]) -> None:
        """Count the prompt; the common part with the text before stays counted."""
        self._text.begin(tokens)

    def root(self, request: DraftRequest, highest: int) -> NodeRows | None:
        """Count the text, and return its row; None before anything was counted."""
        tokens, place = request.tokens, request.state.grammar
        self._text.extend(tokens[len(self._text.tokens) :])
        self._place = None if place is None else place.after(tokens[place.length :])
        self._keeps_rows = request.keep != "nothing" or request.fallback > 0.0
        self._last = list(tokens[1 - self._order :]) if self._order > 1 else []
        self._paths = []
        return self._row(())

    def below(self, parents: Sequence[int], tokens: Sequence[int]) -> NodeRows | None:
        """Return the row after a token."""
        above = self._paths[parents[0]] if parents[0] != ROOT else []
        self._paths.append([*above, tokens[0]])
        return self._row(self._paths[-1])

    def _row(self, path: Sequence[int]) -> NodeRows | None:
        law = self._law.after([*self._last, *path])
        if law is None:
            return None
        whole = [whole_row(law)] if self._keeps_rows else None
        if self._place is not None:
            law = allowed(law, self._place.after(path))
        return NodeRows(whole, highest=row_of(law))

    def observe(self, outcome: RoundOutcome) -> None:
        """Count committed tokens."""
        self._text.extend(outcome.tokens[len(self._text.tokens) :])

    def rewind(self, length: int) -> None:
        """Take back the tokens from position `length` on."""
        self._text.cut(length)


def row_of(law: Law) -> HighestLogits:
    """Return a distribution on few tokens as a row of logits, which settings cut and temper."""
    # In float32, as every model's rows: transforms expect that.
    logits = np.log(law.probs).astype(np.float32)
    ids = np.arange(len(logits)) if law.ids is None else law.ids
    return HighestLogits(ids.astype(np.int32)[None], logits[None])


def whole_row(law: Law) -> Logits:
    """Return the logarithms of a distribution on few tokens as one whole row."""
    assert law.ids is not None
    row = np.full(int(law.ids.max()) + 1, -np.inf, np.float32)
    row[law.ids] = np.log(law.probs)
    return row


def allowed(law: Law, place: GrammarState) -> Law:
    """Return a distribution of few tokens given a grammar; itself if the grammar allows none."""
    ids = np.arange(len(law.probs)) if law.ids is None else law.ids
    weights = np.where(place.allowed(ids), law.probs, 0.0)
    kept = weights.nonzero()[0]
    return Law.normalised(weights[kept], ids[kept]) if len(kept) else law


# == The builder of `ngram(order=2, file=FILE, pool=FILE)` =========================================


ORDER = 2
"""Bigrams, as in Leviathan et al. (2023)."""


def build_ngram(expression: Expression, env: DraftEnvironment, build: BuildPart) -> DrafterWeights:
    """Build `ngram(order=2, file=F, pool=F, n=auto, sampling=with, p_min=0)`.

    Raises OptionError for an order that is not counted, and the errors of reading the files.
    """
    options = options_of(expression)
    order, chain = options.integer("order", ORDER), ChainOptions.of(expression, "with")
    if not 1 <= order <= MAX_ORDER:
        raise OptionError(f"order is {order}: n-grams of 1 to {MAX_ORDER} tokens are counted")
    vocabulary = env.target.vocabulary
    texts: list[Sequence[int]] = []
    file, pool = options.optional("file"), options.optional("pool")
    if file is not None:
        texts.append(read_reference_tokens(Path(file).expanduser(), vocabulary))
    if pool is not None:
        texts += load_pool(Path(pool).expanduser(), vocabulary)
    sources = [TextCounts(texts, order, vocabulary.size)] if texts else []

    count = env.most_drafted if chain.n is None else chain.n
    if count + 1 > env.context.n_batch:
        raise OptionError(
            f"{expression}: a chain of {count} tokens and its root do not fit a batch of "
            f"{env.context.n_batch}: lower n, or raise the batch size (-b)"
        )

    if count < 1:
        raise OptionError(f"n is {count}: draft at least 1 token (or use none)")
    drafts = chain.drafts(expression, env)

    def start() -> GrowingDrafter:
        return drafts.drafter(NgramSource(order, sources), 0.0)

    return DrafterWeights(drafts.name, start, pace=drafts.pace)
