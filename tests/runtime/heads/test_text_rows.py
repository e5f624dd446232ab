"""Rows that wait are in order, and what a head does with them is the same whenever it does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.head_chains import PairChainByDepth, chain_plan, eagle_drafter, whole_places
from support.interrupts import Interrupted

from specrun.runtime.drafters import states_source
from specrun.runtime.drafters.eagle import EagleRows, EagleSource, EagleState
from specrun.runtime.drafters.eagle import source as eagle_state
from specrun.runtime.heads import NamedChildren, RowPiece, RowPlaces, TextRows
from specrun.runtime.heads import states as states_module
from specrun.runtime.laws import SamplingParams, SeededNoise
from specrun.runtime.round import DraftRequest
from specrun.runtime.trees import Topology

VOCAB = 50


def test_rows_come_in_the_order_in_which_they_were_added() -> None:
    put: list[tuple[int, list[int], list[float]]] = []  # position, tokens, rows

    def evaluate(piece: RowPiece) -> int:
        put.append((piece.position, piece.tokens, piece.rows[:, 0].tolist()))
        return piece.position + len(piece)

    rows = TextRows[int](evaluate, 40, ahead=1, chunk=4)
    text = [*range(100, 120)]
    numbers = np.arange(20, dtype=np.float32)[:, None]
    rows.learn(0, numbers[:2], text[:3])
    rows.learn(2, numbers[2:2], text[:3])
    rows.learn(2, numbers[2:3], text[:4])
    piece = rows.due(text[:4], 2)  # one stays: the others are put into their cells
    assert piece is not None
    assert (piece.position, piece.count, piece.tokens) == (2, 2, [103])
    assert piece.rows[:, 0].tolist() == [2]
    assert put == [(0, [101, 102], [0, 1])]
    rows.settle(piece)
    assert (rows.base, rows.count, rows.room) == (0, 3, 37)
    rows.learn(3, numbers[3:9], text[:10])  # more than may wait
    assert put[1:] == [(3, [104, 105, 106, 107], [3, 4, 5, 6])]
    rows.cut(9)  # of what waits the first row still holds
    assert rows.said(text[:9]) == 8
    assert put[2:] == [(7, [108], [7])]
    assert numbers[:, 0].tolist() == [*range(20)]  # nothing has changed them


class SummingHead(PairChainByDepth):
    """A pair's token depends on all tokens, states and positions that it sees: any mistake changes
    the tokens."""

    def __init__(self) -> None:
        self.n_cells = 120
        self.taps, self.n_params, self.whole_rows = (), 0, False
        self.fails = False
        self.evaluated: list[int] = []
        self._cells = np.zeros((self.n_cells, 3))

    def evaluate(
        self, tokens: Sequence[int], states: np.ndarray, places: RowPlaces, **_: object
    ) -> EagleRows:
        positions, cells, sees = whole_places(places)
        if self.fails:
            raise KeyboardInterrupt
        self.evaluated.append(len(tokens))
        self._cells[cells] = np.stack([tokens, states[:, 0], positions], 1)
        hashes = []
        for row in sees:
            seen = self._cells[np.flatnonzero(row)]
            hashes.append(int((seen * [7, 13, 29]).sum() + (seen[:, 0] * seen[:, 2]).sum()))
        predicted = np.array([[float(digest % 101)] for digest in hashes])
        drafted = np.array([[digest % VOCAB, (digest + 1) % VOCAB] for digest in hashes], np.int32)
        return EagleRows(predicted, drafted, np.log(np.full(drafted.shape, 0.5)), None)


class NoChains(SummingHead):
    """The same head where ggml has no graph for chains."""

    def tree(self, *given: object) -> NamedChildren | None:  # type: ignore[override]
        return None


def asking(text: Sequence[int]) -> DraftRequest:
    return DraftRequest(text, SamplingParams(temperature=0.0), SeededNoise(0), 9, 9)


def state_of(head: Any) -> Any:
    """The state of a source, which names trees as the source does."""
    source = EagleSource(head)
    source.state.tree = lambda text, plan: source.named(asking(text), plan)
    return source.state


def feature(text: Sequence[int], position: int) -> list[float]:
    return [float(sum((i + 1) * token for i, token in enumerate(text[: position + 1])) % 97)]


def features(text: Sequence[int], first: int, n: int) -> np.ndarray:
    return np.array([feature(text, position) for position in range(first, first + n)]).reshape(n, 1)


def fresh(text: Sequence[int], base: int = 0) -> EagleRows:
    """What a head says that evaluates all pairs of a text at once."""
    n = len(text) - 1 - base
    places = range(base, base + n), range(n), 0, np.tri(n, dtype=bool)
    return SummingHead().evaluate(text[base + 1 :], features(text, base, n), places)


@pytest.mark.parametrize("kind", [SummingHead, NoChains])
@pytest.mark.parametrize("seed", range(8))
def test_pairs_hold_after_any_rounds_whenever_they_are_evaluated(
    kind: type[SummingHead], seed: int
) -> None:
    """Rounds that draft a chain, a tree or nothing, answers that share beginnings: the tokens are a
    fresh head's."""
    random = np.random.default_rng(seed)
    head = kind()
    state = state_of(head)
    text: list[int] = []
    drafted = 0
    for _ in range(80):
        if len(text) > 100 or not text or random.random() < 0.1:
            kept = int(random.integers(0, len(text) + 1)) if text else 0
            known = text
            text = [*text[: min(kept, 60)], *random.integers(0, VOCAB, 3).tolist()]
            state.begin(text)
            cached = next(
                (i for i, (a, b) in enumerate(zip(known[:-1], text, strict=False)) if a != b),
                len(known) - 1,
            )
            start = max(
                0, min(cached, len(text) - 1) - 1
            )  # the pair of the last shared token has a new token after it
            if start < len(text) - 1:
                state.learn(start, features(text, start, len(text) - 1 - start), text)
        else:
            n = int(random.integers(1, 7))
            first = len(text) - 1
            text = [*text, *random.integers(0, VOCAB, n).tolist()]
            state.learn(first, features(text, first, n), text)
        asked = int(random.integers(0, 4))
        assert state.base == 0
        wanted = fresh(text)
        if asked == 1:
            row = state.root(text)
            if row is not None:
                np.testing.assert_array_equal(row.tokens, wanted.tokens[-1:])
                state.below([-1], [3])
                drafted += 1
        for _ in range(asked - 1):  # once, or a second time in the same round
            chain = state.tree(text, chain_plan(3))
            if chain is not None:
                assert chain.tokens[0] == wanted.tokens[-1, 0]
                drafted += 1
            again = state.root(text)
            if again is not None:
                np.testing.assert_array_equal(again.tokens, wanted.tokens[-1:])
        assert state.root([*text, 3]) is None
        assert state.tree([*text, 3], chain_plan(2)) is None
    assert drafted > 10


@pytest.mark.parametrize("missing", [1, 2, 5])
def test_pairs_after_a_gap_have_their_own_tokens(missing: int) -> None:
    """The pairs before it are given up; those after it are what a head says that saw no more."""
    text = np.random.default_rng(missing).integers(0, VOCAB, 30).tolist()
    state = state_of(SummingHead())
    state.learn(0, features(text, 0, 9), text[:10])
    start = 9 + missing
    state.learn(start, features(text, start, len(text) - 1 - start), text)
    chain = state.tree(text, chain_plan(3))
    assert chain is not None
    assert chain.tokens[0] == fresh(text, start).tokens[-1, 0]
    assert fresh(text, start).tokens[-1, 0] != fresh(text).tokens[-1, 0]


def test_a_prompt_that_comes_again_is_drafted_from_at_once() -> None:
    """The session shows the state before its last token once more."""
    text = np.random.default_rng(3).integers(0, VOCAB, 12).tolist()
    state = state_of(SummingHead())
    state.learn(0, features(text, 0, 11), text)
    assert state.tree(text, chain_plan(3)) is not None
    state.begin(text)
    state.learn(10, features(text, 10, 1), text)
    chain = state.tree(text, chain_plan(3))
    assert chain is not None
    assert chain.tokens[0] == fresh(text).tokens[-1, 0]


def test_a_chain_is_not_longer_than_the_cells() -> None:
    head = SummingHead()
    drafter = eagle_drafter(head, Topology.chain(5))
    text = list(range(head.n_cells))
    drafter.source.state.learn(0, features(text, 0, head.n_cells - 2), text)
    assert drafter.source.named(asking(text[:-1]), chain_plan(5)) is None
    assert (
        len(drafter.propose(asking(text[:-1]))) == 3
    )  # two cells are left, and the first needs none


def test_what_was_not_drafted_from_is_evaluated_many_at_a_time() -> None:
    head = SummingHead()
    state = state_of(head)
    text = list(range(90))
    for position in range(80):
        state.learn(position, features(text, position, 1), text)
    assert head.evaluated == [64]
    assert state.root(text[:81]) is not None
    assert head.evaluated == [64, 16]


def test_an_interrupted_evaluation_loses_nothing() -> None:
    head = SummingHead()
    state = state_of(head)
    text = list(range(20, 40))
    state.learn(0, features(text, 0, 9), text)
    for ask in (lambda: state.root(text[:10]), lambda: state.tree(text[:10], chain_plan(3))):
        head.fails = True
        with pytest.raises(KeyboardInterrupt):
            ask()
        head.fails = False
        row = state.root(text[:10])
        assert row is not None
        np.testing.assert_array_equal(row.tokens, fresh(text[:10]).tokens[-1:])
        state.begin(text[:7])
        state.learn(5, features(text, 5, 4), text)


def test_a_state_whose_token_came_later_joins_the_others() -> None:
    """After a drafted end token nothing follows; the next prompt does, and its states begin one
    position later."""
    text = np.random.default_rng(5).integers(0, VOCAB, 20).tolist()
    state = state_of(SummingHead())
    state.learn(0, features(text, 0, 10), text[:10])  # of the last token, too
    assert state.root(text[:10]) is not None
    state.begin(text)
    state.learn(10, features(text, 10, 9), text)
    row = state.root(text)
    assert row is not None
    assert state.base == 0
    np.testing.assert_array_equal(row.tokens, fresh(text).tokens[-1:])
    # The control: the token that followed it was forgotten together with it.
    state.begin([*text[:9], VOCAB + 1, *text[10:]])
    state.learn(10, features(text, 10, 9), text)
    assert state.base == 10


FILES = [states_module.__file__, eagle_state.__file__, states_source.__file__]


def use(state: EagleState, text: list[int]) -> Iterator[Callable[[], object]]:
    """Everything that a drafter asks of a state, in rounds, with a gap and another answer."""
    yield lambda: state.begin(text[:8])
    yield lambda: state.learn(0, features(text, 0, 7), text[:8])
    yield lambda: state.tree(text[:8], chain_plan(3))
    yield lambda: state.learn(7, features(text, 7, 3), text[:11])
    yield lambda: state.root(text[:11])
    yield lambda: state.below([-1, -1], [3, 4])
    yield lambda: state.learn(
        10, features(text, 10, 2), text[:12]
    )  # the last state's token is not known yet
    yield lambda: state.begin([*text[:9], *text[:7]])
    yield lambda: state.learn(9, features([*text[:9], *text[:7]], 9, 6), [*text[:9], *text[:7]])
    yield lambda: state.tree([*text[:9], *text[:7]], chain_plan(2))
    yield lambda: state.cut(11)
    yield lambda: state.learn(20, features(text, 20, 70), text)
    yield lambda: state.tree(text[:91], chain_plan(3))


def test_an_interrupt_at_any_line_leaves_pairs_that_agree() -> None:
    """Whatever an interrupt leaves, the next text's tokens are those of a head that has seen its
    pairs and no more."""
    text = np.random.default_rng(6).integers(0, VOCAB, 95).tolist()
    with Interrupted(files=FILES) as counting:
        for step in use(state_of(SummingHead()), text):
            step()
    assert counting.lines > 150
    for at in range(1, counting.lines + 1):
        state = state_of(SummingHead())
        with Interrupted(at, FILES):
            for step in use(state, text):
                step()
        for start in (8, 30):  # the target's cache holds the text up to there, or it does not
            other = [*text[:9], *text[40:70]]
            state.begin(other)
            state.learn(start, features(other, start, len(other) - 1 - start), other)
            row, chain = state.root(other), state.tree(other, chain_plan(2))
            assert row is not None
            assert chain is not None
            wanted = fresh(other, state.base).tokens[-1:]
            np.testing.assert_array_equal(row.tokens, wanted)
            assert chain.tokens[0] == wanted[0, 0]
