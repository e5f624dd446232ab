"""What a diagnosis says of machines and drafters whose figures are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.simulated_machine import FLAT, STEEP, Simulated

from specrun.bench.diagnosis.diagnosis import Diagnosis, Work, diagnose
from specrun.bench.drafters.comparison import DrafterBench, measure_drafters
from specrun.bench.timing import Ratio
from specrun.bindings.contexts import ContextOptions
from specrun.cli.accelerate.report import verdict_lines
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import CostCurve, save_curve


def found(
    curve: CostCurve, drafter: Simulated, *, python: float = 1.0, mixture: tuple[int, int] = (0, 0)
) -> Diagnosis:
    """Diagnose a drafter whose rounds take so many times the usual time of Python."""

    def slowed(work: Work) -> Work:
        more = (python - 1.0) * work.python_s
        values = {name: getattr(work, name) for name in Work.__slots__}
        return Work(**{**values, "python_s": work.python_s + more, "seconds": work.seconds + more})

    plain, drafted = Simulated().work(curve), slowed(drafter.work(curve))
    return diagnose("prompt-lookup", 0.0, plain, drafted, curve, mixture=mixture)


@pytest.mark.parametrize("curve", [FLAT, STEEP], ids=["flat", "steep"])
@pytest.mark.parametrize(
    "drafter",
    [
        Simulated(0.8, 4, seconds=0.002),
        Simulated(0.5, 1, seconds=0.001),
        Simulated(0.9, 6, coverage=0.3),
        Simulated(),
    ],
)
def test_what_the_curve_lets_expect_is_what_it_takes(curve: CostCurve, drafter: Simulated) -> None:
    diagnosis = found(curve, drafter)
    assert diagnosis.expected == pytest.approx(diagnosis.speed_up, rel=1e-9)
    assert diagnosis.expected_target_ms == pytest.approx(diagnosis.target_ms)
    assert diagnosis.expected_plain_ms == pytest.approx(diagnosis.plain_ms)
    parts = diagnosis.target_ms + diagnosis.drafter_ms + diagnosis.python_ms
    assert parts == pytest.approx(diagnosis.round_ms)


def test_rounds_of_changing_widths_are_expected_to_build_their_graphs_anew() -> None:
    """By the share of them; where none was built anew, that costs nothing."""
    anew = CostCurve(FLAT.sizes, FLAT.reused, tuple(0.002 + s for s in FLAT.reused))
    plain, drafted = Simulated().work(FLAT), Simulated(0.8, 4, coverage=0.5).work(FLAT)
    assert diagnose("d", 0.0, plain, drafted, anew).expected_target_ms == pytest.approx(
        1e3 * drafted.target_s / drafted.rounds
    )
    more = 0.75 * drafted.rounds * 0.002
    slower = dataclasses.replace(
        drafted,
        rebuilt=round(0.75 * drafted.rounds),
        target_s=drafted.target_s + more,
        seconds=drafted.seconds + more,
    )
    diagnosis = diagnose("d", 0.0, plain, slower, anew)
    assert diagnosis.rebuilt_share == 0.75
    assert diagnosis.expected == pytest.approx(diagnosis.speed_up, rel=1e-9)
    assert diagnosis.expected_target_ms == pytest.approx(diagnosis.target_ms)
    assert diagnose("d", 0.0, plain, slower, FLAT).expected > 1.05 * diagnosis.speed_up


def test_a_target_that_is_slower_than_its_curve_is_seen() -> None:
    slow = Simulated(0.8, 4).work(FLAT, slow=1.5)
    diagnosis = diagnose("d", 0.0, Simulated().work(FLAT), slow, FLAT)
    assert diagnosis.expected > 1.3 * diagnosis.speed_up
    assert diagnosis.target_ms == pytest.approx(1.5 * diagnosis.expected_target_ms)
    assert diagnosis.curve_fits
    (reason,) = (each for each in diagnosis.reasons if each.kind == "rounds")
    assert "take 1.5 times as long as by the cost curve" in reason.text
    assert reason.without == diagnosis.expected
    # A machine on which everything takes as much longer is no reason, and less is not told.
    for plain, drafted in ((1.5, 1.5), (1.0, 1.05)):
        works = (Simulated().work(FLAT, slow=plain), Simulated(0.8, 4).work(FLAT, slow=drafted))
        kinds = [each.kind for each in diagnose("d", 0.0, *works, FLAT).reasons]
        assert "rounds" not in kinds


def test_a_drafter_that_is_right_often_enough_by_the_curve_is_not_called_too_weak() -> None:
    """Slow rounds make it lose; its drafts would pay where they took what the curve says."""
    slow = diagnose("d", 0.0, Simulated().work(FLAT), Simulated(0.4, 1).work(FLAT, slow=1.6), FLAT)
    assert slow.speed_up < 1.0 < slow.expected
    (weak,) = (each for each in slow.reasons if each.kind == "drafter")
    assert "could be better: 40 % of its drafts are accepted; by the cost curve" in weak.text
    (weak,) = (each for each in found(FLAT, Simulated(0.05, 4)).reasons if each.kind == "drafter")
    assert "too weak" in weak.text


def test_a_curve_of_a_busy_machine_is_seen() -> None:
    works = (known.work(FLAT, slow=0.5) for known in (Simulated(), Simulated(0.8, 4)))
    diagnosis = diagnose("d", 0.0, *works, FLAT)
    assert not diagnosis.curve_fits
    assert verdict_lines(diagnosis)[0].startswith("The cost curve does not fit")
    pays = "Drafting with prompt-lookup makes answers about 3.1 times as fast."
    assert verdict_lines(found(FLAT, Simulated(0.8, 4)))[0] == pays


def test_a_range_that_spans_1_is_no_gain() -> None:
    works = [each.work(FLAT) for each in (Simulated(), Simulated(0.8, 4))]
    ratio = Ratio(1.2, 0.97, 1.4)
    diagnosis = diagnose("d", 0.0, *works, FLAT, speed_up=ratio)
    assert not diagnosis.pays
    assert verdict_lines(diagnosis)[0] == (
        "Drafting with d does not make answers measurably faster: 1.2 times the speed of plain "
        "decoding (0.97 to 1.4)."
    )


@pytest.mark.parametrize(
    ("curve", "drafter", "python", "kind"),
    [
        (STEEP, Simulated(0.85, 4), 1.0, "curve"),
        (FLAT, Simulated(0.2, 4), 1.0, "drafter"),
        (FLAT, Simulated(0.9, 6, coverage=0.05), 1.0, "silent"),
        (FLAT, Simulated(0.85, 4, seconds=0.05), 1.0, "drafting"),
        (FLAT, Simulated(0.85, 2), 200.0, "python"),
    ],
)
def test_the_first_reason_is_what_stands_in_the_way(
    curve: CostCurve, drafter: Simulated, python: float, kind: str
) -> None:
    diagnosis = found(curve, drafter, python=python)
    assert diagnosis.reasons[0].kind == kind
    assert diagnosis.reasons[0].without > diagnosis.expected
    assert diagnosis.reasons[0].help


def test_only_what_quotes_is_said_to_have_nothing_to_say() -> None:
    plain, drafted = (known.work(FLAT) for known in (Simulated(), Simulated(0.9, 6, coverage=0.05)))
    for name, is_said in (("prompt-lookup", True), ("eagle(head.gguf)", False)):
        reasons = diagnose(name, 0.0, plain, drafted, FLAT).reasons
        assert ("silent" in [reason.kind for reason in reasons]) == is_said


def test_experts_take_the_curves_place() -> None:
    diagnosis = found(STEEP, Simulated(0.85, 4), mixture=(64, 6))
    assert diagnosis.reasons[0].kind == "experts"
    assert "6 of 64 experts" in diagnosis.reasons[0].text


def test_nothing_stands_in_the_way_of_a_good_drafter_on_a_flat_curve() -> None:
    diagnosis = found(FLAT, Simulated(0.9, 6, seconds=0.0002))
    assert diagnosis.pays
    assert diagnosis.reasons == ()


def test_the_best_achievable() -> None:
    best = found(STEEP, Simulated(0.85, 4)).best
    # Always right, at no cost: n + 1 tokens in T(n + 1), which still falls at n = 8 and beyond.
    assert best.perfect == pytest.approx((1 + 16) / 9.0, rel=0.3)
    assert best.perfect > best.same > 1.0
    assert best.same_length >= 2
    assert best.needed is not None
    # A drafter that is as good as is needed pays; one a little worse does not.
    assert 0.4 < best.needed < 0.85
    dear = found(STEEP, Simulated(0.5, 2, seconds=0.1))
    assert dear.best.needed is None
    assert "no drafter that costs as much" in next(
        reason.text for reason in dear.reasons if reason.kind == "drafter"
    )


def test_a_drafter_that_never_drafts_has_no_acceptance() -> None:
    diagnosis = found(STEEP, Simulated())
    assert diagnosis.acceptance is None
    assert diagnosis.speed_up == 1.0
    assert not diagnosis.pays
    # It plans by the curve, which is why it says nothing.
    assert diagnosis.reasons[0].kind == "curve"
    json.dumps(diagnosis.to_dict(), allow_nan=False)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_comparison_says_why_where_the_curve_is_known(
    tiny_model: Path,
    tiny_drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_known: bool,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    context = ContextOptions(n_ctx=256, n_threads=1)
    if is_known:
        # So much for a second token that any drafter is in vain, whatever this machine takes.
        save_curve(CostCurve.flat([1e-6, 1e-1]), tiny_model, context, 0)
    drafter = f'draft("{tiny_drafter}", n=4)'
    bench = DrafterBench(
        tiny_model,
        (drafter,),
        ("abc",),
        (SamplingParams(temperature=0.0),),
        max_tokens=12,
        repetitions=1,
        options={"context": context, "trust": True},
    )
    plain, drafted = measure_drafters(bench)
    assert plain.reason is None
    if is_known:
        assert drafted.reason is not None
        slow = dataclasses.replace(drafted, speed_up=Ratio(0.5, 0.5, 0.5))
        assert "steep" in drafted.reason or "too weak" in drafted.reason
        assert drafted.reason in str(slow.advice)
    else:
        assert drafted.reason is None
