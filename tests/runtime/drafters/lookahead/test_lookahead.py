"""Lookahead and Jacobi decoding without a model: the paper's layout and pool, exactness, and what
bounds do to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.enumeration import TOLERANCE, drafter_bias
from support.plain_lookahead import PlainLookahead, PlainPool
from support.scripted import PLAIN, LawTable, TableTarget, conversation_of

from specrun.runtime.acceptance import ExactRule
from specrun.runtime.drafters.combinators import EnsembleDrafter
from specrun.runtime.drafters.lookahead import (
    Guesses,
    JacobiDrafter,
    LatestGuesses,
    LookaheadDrafter,
    LookaheadWindow,
    NgramPool,
    NgramStore,
    PlannedGuesses,
    WindowGuard,
    continuations,
    window_leaves,
    window_nodes,
)
from specrun.runtime.laws import Law, NoiseSource, SamplingParams, SeededNoise
from specrun.runtime.planning import CostCurve
from specrun.runtime.round import CachedText, Drafter, DraftRequest, NoDrafter
from specrun.runtime.round.drafter import RoundOutcome
from specrun.runtime.round.loop import DecodeSettings, Round, RoundLimits, decode_rounds
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder
from specrun.runtime.trees.layout import count_leaves
from specrun.runtime.trees.tree import Draw

GREEDY = SamplingParams(temperature=0.0)
START = [0, 1, 2, 1]
FREE = CostCurve.flat([1.0, 1.001])


def lookahead(
    width: int = 3,
    ngram: int = 4,
    guesses: Guesses | None = None,
    pool: NgramPool | None = None,
    guard: WindowGuard | None = None,
    learn_text: bool = True,
) -> LookaheadDrafter:
    store = NgramStore(NgramPool(ngram, per_key=4, max_keys=8) if pool is None else pool)
    branch = guesses or LatestGuesses(3, ngram)
    return LookaheadDrafter(
        ngram=ngram,
        width=width,
        guesses=branch,
        store=store,
        guard=guard,
        learn_text=learn_text,
        seed=7,
    )


def pool_of(drafter: LookaheadDrafter) -> NgramPool:
    return drafter._store.pool


def run(
    drafter: Drafter,
    table: Callable[[Sequence[int]], np.ndarray],
    length: int,
    params: SamplingParams = GREEDY,
    *,
    noise: NoiseSource | None = None,
    max_nodes: int = 64,
    n_ctx: int = 512,
    prompt: Sequence[int] = START,
    after: Callable[[list[int], Round], None] = lambda _tokens, _round: None,
) -> list[int]:
    drafter.begin(prompt)
    conversation = conversation_of(drafter, prompt, noise or SeededNoise(3))
    limits = RoundLimits(n_ctx=n_ctx, max_nodes=max_nodes, max_tokens=length)
    target = TableTarget(table)  # type: ignore[arg-type]
    for one in decode_rounds(target, conversation, DecodeSettings(ExactRule(), params, limits)):
        after(conversation.tokens, one)
    return conversation.tokens


class Periodic(LawTable):
    """A target whose next token hangs on the last two: its text soon repeats, so that n-grams are
    accepted."""

    def __init__(self, size: int = 6, seed: int = 1) -> None:
        self._next = np.random.default_rng(seed).integers(size, size=(size, size))
        self._size = size

    def greedy(self, text: Sequence[int]) -> int:
        return int(self._next[text[-2], text[-1]])

    def __call__(self, prefix: Sequence[int]) -> np.ndarray:
        law = np.full(self._size, 0.5 / self._size)
        law[self.greedy(prefix)] += 0.5
        return law


# -- the paper's layout ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", range(1, 7))
@pytest.mark.parametrize("n", range(2, 7))
def test_the_window_is_laid_out_as_in_the_paper(width: int, n: int) -> None:
    """(N-1)W - 1 nodes and W leaves once warm, one row more a pass until then, always W + N - 3
    deep."""
    window = LookaheadWindow(width, n, lambda: 0)
    for number in range(n + 2):
        rows = min(number + 1, n - 1)
        columns = width + n - 1 - rows
        builder = TreeBuilder()
        last_row = window.add_to(builder)
        tree = builder.build()
        assert len(tree) == window.n_nodes == rows * columns - 1 <= window_nodes(width, n)
        assert count_leaves(tree.parents) == (columns if rows > 1 else 1) <= window_leaves(width, n)
        assert not any(tree.is_candidate)
        assert tree.candidate_depth == 0
        # Row r of column c stands c + r after the root, below row 0 of columns 1 to c and rows 1 to
        # r of its column.
        assert [0 if node == ROOT else tree.depths[node] for node in last_row] == [
            c + rows - 1 for c in range(columns)
        ]
        assert window.is_warm == (number >= n - 2)
        assert bool(window.advance(5, list(range(columns)))) == window.is_warm or number == n - 3
    assert (len(tree), window.columns) == ((n - 1) * width - 1, width)


@pytest.mark.parametrize("params", [GREEDY, PLAIN], ids=["greedy", "sampled"])
@pytest.mark.parametrize("learn_text", [False, True])
@pytest.mark.parametrize(
    ("width", "n", "limit"), [(1, 2, 1), (5, 4, 2), (3, 3, 3), (2, 5, 4), (4, 2, 2), (1, 5, 2)]
)
def test_pool_and_guesses_are_those_of_a_plain_reference_after_every_round(
    width: int, n: int, limit: int, learn_text: bool, params: SamplingParams
) -> None:
    """Through the shipped loop, against windows kept by absolute position and a pool that is a
    plain list."""
    target = Periodic()
    generator = random.Random(7)
    plain = PlainLookahead(
        target.greedy, width, n, START, [generator.choice(START) for _ in range(width + n - 3)]
    )
    pool = PlainPool(4, 8)
    drafter = lookahead(width, n, LatestGuesses(limit, n), learn_text=learn_text)
    before = list(START)
    kept: list[int] = []

    def learn(text: Sequence[int], start: int) -> None:
        for end in range(max(start + 1, n), len(text) + 1):
            if learn_text:
                pool.add(tuple(text[end - n : end]))

    def check(tokens: list[int], this_round: Round) -> None:
        if len(tokens) > 64:  # the end of the answer cuts the window, which other tests are about
            return
        assert drafted(this_round.tree) == prefixes(pool.guesses(before[-1])[:limit])
        window = [
            node for node in range(len(this_round.tree)) if not this_round.tree.is_candidate[node]
        ]
        assert len(window) == max(0, len(plain.rows) * plain.columns - 1)
        for ngram in plain.step(before, len(tokens) - len(before)):
            pool.add(ngram)
        learn(tokens, len(before))
        for first in range(6):
            assert pool_of(drafter).guesses(first) == pool.guesses(first)
        before[:] = tokens
        kept.append(len(this_round.path))

    learn(START, 0)
    run(drafter, target, 75, params, after=check)
    assert max(kept) >= min(2, n - 1)  # several tokens at once move the window on with the root


def drafted(tree: DraftTree) -> set[tuple[int, ...]]:
    """The paths of all candidates; every draw is a point mass."""
    assert all(draw.law is None for draws in tree.draws.values() for draw in draws)
    return {
        tuple(tree.tokens[ancestor] for ancestor in tree.path_to(node))
        for node in range(len(tree))
        if tree.is_candidate[node]
    }


def prefixes(guesses: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {guess[: i + 1] for guess in guesses for i in range(len(guess))}


def test_a_window_with_another_row_0_makes_other_ngrams() -> None:
    """Negative control of the comparison above: the n-grams hang on what row 0 holds at every
    position."""
    target = Periodic()
    text, other = list(START), list(START)
    right = PlainLookahead(target.greedy, 4, 4, START, [0, 1, 2, 3, 4])
    wrong = PlainLookahead(target.greedy, 4, 4, START, [0, 1, 2, 3, 4])
    for _ in range(8):
        ours = right.step(text, 1)
        theirs = wrong.step(other, 1)
        wrong.rows[0] = {place: (token + 1) % 6 for place, token in wrong.rows[0].items()}
        text.append(target.greedy(text))
        other.append(target.greedy(other))
    assert ours != theirs


@pytest.mark.parametrize("n", [3, 5])
def test_a_text_that_repeats_is_read_several_tokens_at_a_time(n: int) -> None:
    """The window alone (nothing learned from the text) finds the repetition."""
    kept: list[int] = []
    drafter = lookahead(5, n, LatestGuesses(5, n), learn_text=False)
    run(drafter, Periodic(), 80, after=lambda _, this_round: kept.append(len(this_round.path)))
    assert sum(kept) > len(kept)
    assert max(kept) == n - 1


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_nodes", [0, 1, 3, 9, 20])
@pytest.mark.parametrize("n_ctx", [len(START) + 1, 30])
@pytest.mark.parametrize("make", [lookahead, JacobiDrafter], ids=["lookahead", "jacobi"])
def test_never_more_than_allowed_and_the_text_stays(
    make: Callable[[], Drafter], n_ctx: int, max_nodes: int
) -> None:
    """`RoundLimits` refuses larger proposals; windows are cut as the context and the answer end."""
    target = Periodic(seed=2)
    plain = run(NoDrafter(), target, 40, PLAIN, n_ctx=n_ctx)
    assert run(make(), target, 40, PLAIN, n_ctx=n_ctx, max_nodes=max_nodes) == plain


@pytest.mark.parametrize("width", [1, 4])
def test_a_window_that_is_cut_goes_on_with_the_columns_that_are_left(width: int) -> None:
    window = LookaheadWindow(4, 4, iter(range(10, 20)).__next__)
    for outputs in ([0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14]):
        window.advance(9, outputs)
    before = [list(row) for row in window.rows]
    assert window.fit(width + 1, 100)
    assert window.columns == width
    assert window.rows == [before[0][: width - 1], before[1][:width], before[2][:width]]
    assert len(window.advance(9, list(range(width)))) == width
    assert not window.fit(1, 100)


def test_a_warm_up_with_fewer_columns_than_passes_left_is_given_up() -> None:
    window = LookaheadWindow(2, 5, lambda: 0)  # 5 columns, of which three passes drop one each
    assert window.fit(100, 3)
    assert window.columns == 4
    assert not window.fit(100, 2)


def test_an_interrupted_round_and_a_round_of_another_tree_lose_the_window_at_most() -> None:
    drafter = lookahead(3, 3, learn_text=False)
    drafter.begin(START)
    for _ in range(2):  # proposed, and never observed
        tree = drafter.propose(DraftRequest(START, GREEDY, SeededNoise(0), 50, 50))
        assert len(tree) == 3
    rows = TableTarget(Periodic()).evaluate(CachedText(START), DraftTree())  # type: ignore[arg-type]
    drafter.observe(RoundOutcome([*START, 3], DraftTree(), (), 3, rows))
    assert len(drafter.propose(DraftRequest([*START, 3], GREEDY, SeededNoise(0), 50, 50))) == 3


# -- exactness -------------------------------------------------------------------------------------


def known_pool(n: int) -> NgramPool:
    """A pool that has a guess or two for every token."""
    pool = NgramPool(n, per_key=3)
    pool.update(
        (first, (first + step) % 3, (2 * first + step) % 3, step)[:n]
        for first in range(3)
        for step in (1, 2)
    )
    return pool


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "cold": lambda: lookahead(2, 3),
    "warm": lambda: lookahead(2, 3, LatestGuesses(2, 3), known_pool(3)),
    "wide": lambda: lookahead(3, 4, LatestGuesses(3, 4), known_pool(4), learn_text=False),
    "pool only": lambda: lookahead(0, 3, LatestGuesses(2, 3), known_pool(3)),
    "planned": lambda: lookahead(1, 3, PlannedGuesses(FREE), known_pool(3), WindowGuard(FREE)),
    "jacobi": lambda: JacobiDrafter(n=3),
    "ensemble": lambda: EnsembleDrafter(
        [lookahead(2, 3, LatestGuesses(2, 3), known_pool(3)), JacobiDrafter(n=2)]
    ),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("seed", range(2))
def test_the_loop_keeps_the_targets_law(name: str, seed: int) -> None:
    assert drafter_bias(ExactRule(), DRAFTERS[name], LawTable(3, seed), 5) < TOLERANCE


class Shuffled(Drafter):
    """Wraps a drafter and says something false about its guesses."""

    name = "false"

    def __init__(self, inner: Drafter, change: Callable[[DraftTree], DraftTree]) -> None:
        self._inner, self._change = inner, change

    def propose(self, request: DraftRequest) -> DraftTree:
        return self._change(self._inner.propose(request))


def as_if_sampled(tree: DraftTree) -> DraftTree:
    """Guesses that were chosen, stated as draws from the uniform law."""
    law = Law(np.full(3, 1 / 3))
    draws = {
        parent: tuple(Draw(draw.node, law) for draw in draws)
        for parent, draws in tree.draws.items()
    }
    return DraftTree(tree.tokens, tree.parents, tree.depths, tree.is_candidate, draws)


def test_guesses_stated_as_draws_are_caught() -> None:
    """Negative control: the same guesses under a law they were not drawn from bias the text."""

    def make() -> Drafter:
        return Shuffled(DRAFTERS["warm"](), as_if_sampled)

    assert drafter_bias(ExactRule(), make, LawTable(3, 0), 4) > 1e-3


# -- what is guessed -------------------------------------------------------------------------------


def test_continuations_go_from_the_longest_match_to_the_latest_use() -> None:
    pool = NgramPool(4)
    pool.update([(1, 2, 3, 4), (9, 2, 3, 5), (3, 6), (2, 3, 7), (3, 4), (8, 3, 4)])
    assert continuations(pool, (1, 2, 3), 9) == [(4, 3), (7, 2), (6, 1)]
    assert continuations(pool, (9, 2, 3), 2) == [(5, 3), (7, 2)]
    assert continuations(pool, (3,), 9) == [(4, 1), (6, 1)]
    assert continuations(pool, (0,), 9) == []


def request_after(
    tokens: Sequence[int], max_depth: int = 20, end_tokens: frozenset[int] = frozenset()
) -> DraftRequest:
    return DraftRequest(
        tokens, SamplingParams(temperature=0.0), SeededNoise(0), max_depth, 99, end_tokens
    )


@pytest.mark.parametrize(
    "guesses", [PlannedGuesses(FREE), LatestGuesses(3, 4)], ids=["planned", "latest"]
)
def test_nothing_is_guessed_behind_the_end_of_an_answer(
    guesses: PlannedGuesses | LatestGuesses,
) -> None:
    pool, builder = NgramPool(4), TreeBuilder()
    pool.update([(1, 2, 0, 3), (1, 0, 2, 3)])
    guesses.add_to(builder, pool, request_after([1], end_tokens=frozenset({0})), 20, 0)
    tree = builder.build()
    ends = {node for node, token in enumerate(tree.tokens) if token == 0}
    assert ends
    assert not ends & set(tree.parents)


def test_planned_guesses_learn_what_the_pool_is_worth() -> None:
    """Where the pool is right the draft grows, where it is wrong nothing is drafted; both without
    drafting first."""
    steep = CostCurve((1, 2, 4, 8, 16), (1.0, 1.4, 1.6, 2.7, 3.3), (1.0,) * 5)
    pool = NgramPool(4)
    text = [i % 5 for i in range(60)]
    NgramStore(pool).add_text(text, 0, pool.n)

    def sizes(true_text: Sequence[int]) -> list[int]:
        guesses = PlannedGuesses(steep)
        found = []
        for end in range(4, len(true_text)):
            guesses.learn(pool, true_text[: end + 1], end)
            builder = TreeBuilder()
            guesses.add_to(builder, pool, request_after(true_text[: end + 1]), 20, 0)
            found.append(len(builder))
        return found

    assert sizes(text)[-1] >= 7
    other = [token for i in range(15) for token in (i % 5, (i + 1) % 5, (i + 3) % 5, (i + 3) % 5)]
    assert sizes(other)[-20:] == [0] * 20


@pytest.mark.parametrize("beside", [0, 10])
@pytest.mark.parametrize("limit", [0, 1, 3, 12])
def test_planned_guesses_keep_their_bounds(limit: int, beside: int) -> None:
    pool = NgramPool(4)
    pool.update((first, a, b, 0) for first in range(3) for a in range(3) for b in range(3))
    guesses = PlannedGuesses(FREE, max_leaves=2, max_nodes=limit, depth=3)
    for max_depth in (0, 1, 2, 9):
        builder = TreeBuilder()
        guesses.add_to(builder, pool, request_after([0, 1, 2], max_depth), 5, beside)
        tree = builder.build()
        assert len(tree) <= min(limit, 5)
        assert tree.max_depth <= min(max_depth, 3)
        assert count_leaves(tree.parents) <= 2


def test_a_dear_machine_drafts_nothing_and_a_free_one_does() -> None:
    pool = NgramPool(3)
    NgramStore(pool).add_text([1, 2, 3, 1, 2, 3], 0, pool.n)
    sizes = []
    for curve in (CostCurve.flat([1.0, 2.0]), FREE):
        builder = TreeBuilder()
        PlannedGuesses(curve).add_to(builder, pool, request_after([3, 1, 2]), 9, 0)
        sizes.append(len(builder))
    assert sizes[0] == 0 < sizes[1]


def test_the_guard_bounds_what_a_useless_window_costs() -> None:
    """A text that never repeats, and a window that costs half a token a round: the loss stays under
    its credit."""
    curve = CostCurve.flat([1.0 + 0.05 * i for i in range(64)])
    guard = WindowGuard(curve)
    spent, closed = 0.0, 0
    for _ in range(2000):
        n_window = 10 if guard.is_open else 0
        closed += not guard.is_open
        spent += 0.05 * n_window
        guard.count(0, n_window, 0, 1)
    assert spent <= 8.0 + 0.02 * 2000 + 1.0
    assert closed > 1900
    guard.forget()
    assert guard.is_open
    assert guard.debt == 0.0


def test_the_guard_leaves_a_window_that_pays_open() -> None:
    guard = WindowGuard(CostCurve.flat([1.0 + 0.01 * i for i in range(64)]))
    for number in range(500):
        guard.count(6, 20, number % 4 == 0, 1 + number % 2)
        assert guard.is_open


def test_a_window_that_does_not_pay_is_closed_in_the_loop_and_the_text_stays() -> None:
    table = LawTable(12, 3, zeros=0.0)
    curve = CostCurve.flat([1.0 + 0.2 * i for i in range(64)])
    drafter = lookahead(3, 3, LatestGuesses(2, 3), guard=WindowGuard(curve), learn_text=False)
    others: list[int] = []
    text = run(
        drafter,
        table,
        80,
        PLAIN,
        after=lambda _, this_round: others.append(
            len(this_round.tree) - this_round.tree.n_candidates
        ),
    )
    assert others[1] > 0 == others[-10]
    assert text == run(NoDrafter(), table, 80, PLAIN)


# -- Jacobi ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 8])
def test_jacobi_is_the_fixed_point_iteration(n: int) -> None:
    """At temperature 0, against the system of equations solved plainly: same iterates, round by
    round."""
    target = Periodic(seed=4)
    generator = random.Random(0)
    iterate: list[int] = []
    before = list(START)
    kept: list[int] = []

    def check(tokens: list[int], this_round: Round) -> None:
        if len(tokens) > 64:  # the end of the answer cuts the iterate
            return
        while len(iterate) < n:
            iterate.append(generator.choice(before))
        assert this_round.tree.tokens == tuple(iterate[: len(this_round.tree)])
        m = len(this_round.tree)
        corrected = [target.greedy([*before, *iterate[:i]]) for i in range(m + 1)]
        right = next((i for i in range(m) if iterate[i] != corrected[i]), m)
        assert tokens == [*before, *corrected[: right + 1]]
        iterate[:] = corrected[right + 1 :]
        before[:] = tokens
        kept.append(right)

    drafter = JacobiDrafter(n=n)
    run(drafter, target, 80, after=check)
    assert sum(kept) > 0


# -- the pool's life -------------------------------------------------------------------------------


def test_the_pool_goes_on_between_answers_and_an_empty_prompt_starts_it_over() -> None:
    saved: list[list[tuple[int, ...]]] = []
    store = NgramStore(known_pool(3), lambda pool: saved.append(list(pool)))
    begun = list(store.pool)
    drafter = LookaheadDrafter(ngram=3, width=2, guesses=LatestGuesses(2, 3), store=store)
    run(drafter, Periodic(), 20)
    learned = list(store.pool)
    assert learned != begun
    drafter.begin(())
    assert list(store.pool) == begun
    run(drafter, Periodic(seed=9), 20)
    n_saved = len(saved)
    drafter.close()
    assert len(saved) == n_saved  # the store outlives the conversation
    store.close()
    assert set(learned) & set(saved[-1])
    assert set(store.pool) <= set(saved[-1])
    n_saved = len(saved)
    store.close()
    assert len(saved) == n_saved  # nothing new, nothing written


# -- Jacobi's hybrid stop --------------------------------------------------------------------------


def asked_of(drafter: JacobiDrafter, n_said: int, end_tokens: frozenset[int] = frozenset()):
    noise = SeededNoise(0)
    tokens = [*range(10), *range(n_said)]
    return drafter.propose(DraftRequest(tokens, GREEDY, noise, 16, 16, end_tokens))


def test_the_hybrid_iterates_on_the_first_tokens_of_an_answer_only() -> None:
    drafter = JacobiDrafter(n=4, until=6)
    for _ in range(2):  # in the next answer again
        drafter.begin(range(10))
        lengths = [len(asked_of(drafter, n_said)) for n_said in range(8)]
        assert lengths == [4, 4, 4, 3, 2, 1, 0, 0]
    assert len(asked_of(JacobiDrafter(n=4), 0)) == 4


def test_an_iterate_ends_with_its_first_end_token() -> None:
    drafter = JacobiDrafter(n=5)
    drafter.begin(range(10))
    whole = asked_of(drafter, 0).tokens
    cut = asked_of(drafter, 0, frozenset({whole[2]})).tokens
    assert list(cut) == list(whole[: whole.index(whole[2]) + 1])
