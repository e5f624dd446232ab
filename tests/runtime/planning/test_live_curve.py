"""A curve learnt while decoding comes to what rounds take, and one bad round fools nobody."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.bindings.errors import OptionError
from specrun.runtime.planning import (
    SHARE,
    START,
    TYPICAL_CPU,
    TYPICAL_GPU,
    Account,
    CostCurve,
    LiveCurve,
)
from specrun.runtime.planning.curves import DraftCost

# Gemma 3 270M Q4_K_M, and a kernel that likes 8 tokens better than 5.
STEEP = CostCurve.flat([1.0, 2.0, 2.2, 2.3, 3.6, 3.9])
STEPPED = CostCurve.flat([1.0, 1.6, 1.7, 1.7, 2.6, 2.7, 2.8, 2.2])


def ratio(curve: CostCurve, n: int) -> float:
    return curve.seconds(n) / curve.seconds(1)


def test_before_the_first_round_it_is_the_curve_that_it_began_with() -> None:
    live = LiveCurve(TYPICAL_CPU)
    for n in (1, 2, 5, 16, 100):
        assert live.seconds(n) == TYPICAL_CPU.seconds(n)
        assert live.seconds(n, rebuilt=True) == TYPICAL_CPU.seconds(n, rebuilt=True)
    assert (live.sizes, live.widest) == (TYPICAL_CPU.sizes, 0)


@pytest.mark.parametrize("start", [TYPICAL_CPU, TYPICAL_GPU, STEEP], ids=["cpu", "gpu", "measured"])
def test_it_comes_to_what_rounds_take(start: CostCurve) -> None:
    """In milliseconds, of rounds that vary by a tenth; within 15 % after 10 rounds a width."""
    generator, live = np.random.default_rng(1), LiveCurve(start)
    for _ in range(10):
        for n in generator.permutation(6) + 1:
            noise = float(np.exp(0.1 * generator.standard_normal()))
            live.learn(int(n), 0.012 * STEEP.seconds(int(n)) * noise)
    for n in range(1, 7):
        assert live.seconds(n) == pytest.approx(0.012 * STEEP.seconds(n), rel=0.15), n
    assert live.widest == 6


def test_a_width_tells_of_those_beside_it() -> None:
    """Two tokens that cost as much as two rounds: more tokens are believed to be dearer, too."""
    live = LiveCurve(TYPICAL_CPU)
    for _ in range(3):
        live.learn(1, 1.0)
        live.learn(2, 2.0)
    factor = 2.0 / TYPICAL_CPU.seconds(2)
    assert ratio(live, 2) == pytest.approx(2.0, rel=0.06)
    for n in (3, 5, 16, 100):
        assert ratio(live, n) == pytest.approx(factor * TYPICAL_CPU.seconds(n), rel=0.06)


def test_one_bad_round_is_no_cost() -> None:
    """Ten times as long, once: of two rounds the lesser counts, of one it counts and fades."""
    live = LiveCurve(TYPICAL_CPU)
    for seconds in (1.0, 1.0, 10.0, 1.0, 1.0):
        live.learn(1, seconds)
    assert live.seconds(1) == 1.0
    for seconds in (17.5, 1.75):
        live.learn(5, seconds)
    assert live.seconds(5) == pytest.approx(1.75, rel=0.01)
    live.learn(3, 15.0)
    assert ratio(live, 3) > 2.0
    for _ in range(2000):
        live.learn(1, 1.0)
    assert ratio(live, 3) == pytest.approx(TYPICAL_CPU.seconds(3), rel=0.05)


def test_more_tokens_never_take_less_but_for_the_first() -> None:
    live = LiveCurve(STEPPED.as_padded())
    generator = np.random.default_rng(2)
    for _ in range(300):
        n = int(generator.integers(1, 9))
        live.learn(n, STEPPED.seconds(n) * float(np.exp(0.3 * generator.standard_normal())))
    times = [live.seconds(n) for n in range(2, 20)]
    assert times == sorted(times)
    live = LiveCurve(CostCurve.flat([1.0, 0.91, 1.4]))
    for _ in range(4):
        live.learn(1, 1.0)
        live.learn(2, 0.91)
    assert live.seconds(2) == pytest.approx(0.91)


def test_a_machine_that_slows_down_changes_no_ratio() -> None:
    live = LiveCurve(TYPICAL_CPU)
    for slow in (1.0, 3.0):
        for _ in range(40):
            for n in (1, 2, 4):
                live.learn(n, slow * TYPICAL_CPU.seconds(n))
        assert live.seconds(1) == pytest.approx(slow, rel=0.02)
        assert ratio(live, 4) == pytest.approx(TYPICAL_CPU.seconds(4), rel=0.05)


def test_what_was_seen_fades_in_rounds_that_nobody_timed_too() -> None:
    """As in those that were: 300 rounds, of which all or every tenth is timed, or only the last."""
    found = []
    for untimed in (0, 9, 299):
        live = LiveCurve(TYPICAL_CPU)
        for n in (1, 1, 1, 4):
            live.learn(n, 3.0 if n > 1 else 1.0)
        before = live.seconds(4)
        for _ in range(300 // (1 + untimed)):
            live.pass_over(untimed)
            live.learn(1, 1.0)
        for _ in range(40):  # to be sure that it was fitted since
            live.learn(1, 1.0)
        found.append(live.seconds(4))
        assert TYPICAL_CPU.seconds(4) < found[-1] < before
    assert found == pytest.approx([found[0]] * 3, rel=0.01)


# -- padding ---------------------------------------------------------------------------------------


def test_batches_are_padded_to_what_is_cheaper_by_more_than_the_spread() -> None:
    sizes, times = STEPPED.sizes, STEPPED.reused
    quiet = CostCurve(sizes, times, times, (0.02,) * 8)
    assert [quiet.wider(n, 64) for n in range(1, 10)] == [1, 2, 3, 4, 8, 8, 8, 8, 9]
    assert [quiet.wider(n, 7) for n in (5, 6, 7)] == [5, 6, 7]  # there is no room for 8
    noisy = CostCurve(sizes, times, times, (0.3,) * 8)
    assert [noisy.wider(n, 64) for n in (5, 6, 7)] == [5, 6, 7]
    assert [STEPPED.wider(n, 64) for n in (5, 6, 7)] == [5, 6, 7]  # nobody knows the spread
    between = CostCurve((1, 4, 8), (1.0, 3.0, 2.0), (1.0, 3.0, 2.0), (0.0, 0.0, 0.0))
    assert between.wider(6, 8) == 8
    two = CostCurve((1, 2), (1.0, 0.9), (1.0, 0.9), (0.0, 0.0))
    assert two.wider(1, 8) == 1  # plain decoding is what all else is compared with


def test_what_counts_is_the_least_of_what_is_as_wide_or_wider() -> None:
    padded = STEPPED.as_padded()
    assert [padded.seconds(n) for n in range(1, 9)] == [1.0, 1.6, 1.7, 1.7, 2.2, 2.2, 2.2, 2.2]
    for curve in (TYPICAL_CPU, TYPICAL_GPU):
        assert curve.as_padded() == curve
    assert CostCurve((1, 2), (1.0, 0.9), (1.0, 0.9)).as_padded().reused == (1.0, 0.9)


def test_the_spread_is_given_for_each_size_or_for_none() -> None:
    with pytest.raises(OptionError, match="spread"):
        CostCurve((1, 2), (1.0, 2.0), (1.0, 2.0), (0.1,))


# -- the account -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [1, 2])
def test_what_may_be_lost_grows_with_the_tokens(shares: int) -> None:
    account = Account(shares)
    assert account.room == START
    for _ in range(1000):
        account.allow(1)
    assert account.room == pytest.approx(START + 1000 * shares * SHARE)
    account.lose(100.0)
    needed = -account.room / (shares * SHARE)
    assert needed <= account.tokens_until(0.0) < needed + 1.0


def test_what_was_saved_may_be_lost_again_but_not_all_of_it() -> None:
    account = Account()
    account.lose(-100.0)
    assert account.room == START + 8.0
    account.lose(7.0)
    account.allow(16)
    assert account.room == pytest.approx(START + 1.2)
    account.lose(1.0 + START)
    assert account.room == pytest.approx(0.2)


def tries(tokens: int, lost: float, own: float = 0.0) -> tuple[list[int], float]:
    """Return before which tokens a drafter is asked that loses so many rounds each time, and all
    that it loses."""
    account, tried, rest, asked = Account(), [], 0, 0
    for token in range(tokens):
        rest = rest or account.rest()
        if rest:
            rest -= 1
        else:
            tried.append(token)
            account.lose(lost)
            account.lose(account.asking(own, 1.0))
            asked += 1
        account.allow(1)
    # The first asking of all is not booked, and the account believes that it takes twice as much.
    return tried, lost * len(tried) + 2.0 * own * max(0, asked - 1)


@pytest.mark.parametrize(("lost", "own"), [(1.5, 0.0), (0.0, 0.1), (0.5, 0.02), (0.0, 3.0)])
def test_what_is_lost_is_asked_again_as_often_as_tokens_allow(lost: float, own: float) -> None:
    for tokens in (200, 2_000):
        tried, all_lost = tries(tokens, lost, own)
        assert all_lost <= START + SHARE * tokens + lost + 2.0 * own
        assert len(tried) > 1
        assert all_lost >= 0.6 * (START + SHARE * tokens)  # it is not asleep all the time


def test_a_single_pause_of_the_machine_does_not_silence_it_for_long() -> None:
    account = Account()
    for seconds in (0.001, 0.001, 1_000.0):
        account.lose(account.asking(seconds, 1.0))
    assert account.room > 0.0


# -- what drafts take ------------------------------------------------------------------------------


class Drafts:
    """Drafts of two plain rounds a depth, as reckoned; a plain round takes 10 seconds."""

    def __init__(self, *, told: bool = True) -> None:
        self.now, self.told = 0.0, told
        self.cost = DraftCost(
            lambda depth: 2.0 * depth, lambda: 10.0, lambda: self.now, lambda: self.told
        )

    def take(self, seconds: float, depth: int = 1) -> None:
        self.cost.start()
        self.now += seconds
        self.cost.end(depth)


def test_three_drafts_that_were_cold_are_not_believed() -> None:
    """The first ones build graphs; a drafter that was given up for them would never be warm."""
    drafts = Drafts()
    for _ in range(3):
        drafts.take(1000.0)
        assert drafts.cost.seconds(1) == 20.0
    for _ in range(3):
        drafts.take(1000.0)
    assert drafts.cost.seconds(1) == 1000.0  # negative control: six are


def test_nothing_is_believed_of_drafts_where_no_round_is_timed() -> None:
    drafts = Drafts(told=False)
    for _ in range(9):
        drafts.take(60.0)
    assert drafts.cost.seconds(1) == 20.0


def test_it_descends_where_the_measured_curve_does() -> None:
    """Kernels that like 8 tokens better than 5, on a machine that became three times slower: the
    step stays, whichever of the widths are seen, and noise makes no other."""
    start = CostCurve(STEPPED.sizes, STEPPED.reused, STEPPED.rebuilt, (0.02,) * 8)
    for seen in ((1, 2), (1, 5, 8), (1, 3, 7)):
        live, generator = LiveCurve(start), np.random.default_rng(4)
        for _ in range(60):
            for n in seen:
                noise = float(np.exp(0.1 * generator.standard_normal()))
                live.learn(n, 3.0 * STEPPED.seconds(n) * noise)
        for n in range(1, 9):
            assert live.seconds(n) == pytest.approx(3.0 * STEPPED.seconds(n), rel=0.15), n
        assert live.seconds(8) < live.seconds(5)
        below = [live.seconds(n) for n in (2, 3, 4)]
        assert below == sorted(below)
