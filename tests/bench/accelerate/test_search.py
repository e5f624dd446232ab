"""Which drafter a search must choose on machines and drafters whose figures are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.simulated_machine import FLAT, STEEP, Simulated, SimulatedMachine

from specrun.bench.accelerate.candidates import CutFound, FoundDrafter
from specrun.bench.accelerate.record import (
    PLAIN,
    Contender,
    Record,
    Sweep,
    choices,
    hopeful,
    measured,
)
from specrun.bench.accelerate.search import Search, Status
from specrun.bench.accelerate.target import AccelerateOptions
from specrun.bindings.errors import MissingPackageError, OptionError
from specrun.runtime.laws import SamplingParams
from specrun.runtime.planning import ANY, Choice, CostCurve

QUESTIONS, EDITED = "questions", "edited"
LOOKUP, SMALL, HEAD = "prompt-lookup", 'draft("small.gguf", n=4)', 'eagle("head.gguf")'
CUT = 'draft("cut.gguf", n=3)'
GREEDY, WORKLOADS = SamplingParams(temperature=0.0), (QUESTIONS, EDITED)
OPTIONS = AccelerateOptions(Path("target.gguf"), (GREEDY,), repetitions=3, seconds=1e9)
SMALL_FILE = FoundDrafter(Path("small.gguf"), "draft", "beside it")
# Nothing repeats in answers to questions, much does in edits.
SILENT = Simulated(0.1, 3, coverage=0.02)
QUOTING = Simulated(0.9, 6, coverage=0.8)
GOOD = Simulated(0.8, 4)


def machine(
    curve: CostCurve, questions: dict[str, Simulated], **values: object
) -> SimulatedMachine:
    drafters = {
        QUESTIONS: {LOOKUP: SILENT, **questions},
        EDITED: {LOOKUP: QUOTING, **questions},
    }
    return SimulatedMachine(curve, drafters, **values)  # type: ignore[arg-type]


def search(
    simulated: SimulatedMachine, options: AccelerateOptions = OPTIONS, record: Record | None = None
) -> Record:
    record = Record("basis") if record is None else record
    Search(simulated, options, WORKLOADS, record, lambda _: None, lambda: None).run()
    return record


def told_by(
    simulated: SimulatedMachine, options: AccelerateOptions = OPTIONS
) -> list[tuple[float, Status]]:
    """Return what a search told, each with the time of the clock."""
    told: list[tuple[float, Status]] = []

    def tell(status: Status) -> None:
        told.append((simulated.clock, status))

    Search(simulated, options, WORKLOADS, Record("basis"), tell, lambda: None).run()
    return told


def chosen(record: Record, options: AccelerateOptions = OPTIONS) -> dict[str, Choice]:
    found = choices(record, options.temperatures, WORKLOADS, {})
    return {choice.workload: choice for choice in found}


def test_a_good_drafter_is_chosen_on_a_flat_curve() -> None:
    simulated = machine(
        FLAT, {SMALL: Simulated(0.8, 4, seconds=0.002)}, found={SMALL_FILE: [SMALL]}
    )
    found = chosen(search(simulated))
    assert found[QUESTIONS].drafter == SMALL
    assert found[ANY].drafter == SMALL
    assert found[QUESTIONS].speed_up == pytest.approx(2.56, abs=0.05)


def test_the_same_drafter_is_not_chosen_on_a_steep_curve() -> None:
    simulated = machine(
        STEEP, {SMALL: Simulated(0.5, 4, seconds=0.002)}, found={SMALL_FILE: [SMALL]}
    )
    found = chosen(search(simulated))
    assert (found[QUESTIONS].drafter, found[QUESTIONS].speed_up) == ("none", 1.0)
    # What pays on edits is chosen for them, and for texts of which nobody knows what they are only
    # if it loses nowhere.
    assert found[EDITED].drafter == LOOKUP
    assert found[ANY].drafter == LOOKUP


def swept(ratios: dict[str, dict[str, tuple[float, ...]]]) -> Record:
    """Return a record of drafters with these speed-ups, by workload and drafter, sweep by sweep."""
    names = [*next(iter(ratios.values()))]
    record, plain = Record("basis", [Contender(name, "") for name in names]), Simulated()
    quoting = Simulated(0.9, 6, coverage=0.8)
    gain = quoting.work(FLAT).tokens_per_second / plain.work(FLAT).tokens_per_second
    for workload, found in ratios.items():
        for number in range(3):
            works = {PLAIN: plain.work(FLAT)}
            for name in names:
                luck = found[name][number] / gain
                works[name] = dataclasses.replace(quoting, luck=luck).work(FLAT)
            record.sweeps.append(Sweep(0.0, workload, number, works))
    return record


@pytest.mark.parametrize(("least", "drafter"), [(0.96, "none"), (0.99, LOOKUP)])
def test_a_range_that_spans_1_is_no_gain_for_any_text(least: float, drafter: str) -> None:
    """1.04 (0.99 to 1.1) is no gain; 1.04 (1.01 to 1.1) is one."""
    ratios = {QUESTIONS: {LOOKUP: (least, 0.99, 1.01)}, EDITED: {LOOKUP: (1.03, 1.09, 1.18)}}
    found = chosen(swept(ratios))
    assert found[EDITED].drafter == LOOKUP
    assert found[ANY].drafter == drafter


@pytest.mark.parametrize(("lead", "drafter"), [(1.02, LOOKUP), (1.05, SMALL)])
def test_of_drafters_that_are_alike_the_first_is_chosen(lead: float, drafter: str) -> None:
    """2 % are the machine's noise, 5 % are not."""
    both = {LOOKUP: (1.3,) * 3, SMALL: (1.3 * lead,) * 3}
    found = chosen(swept({QUESTIONS: both, EDITED: both}))
    assert {choice.drafter for choice in found.values()} == {drafter}


@pytest.mark.parametrize(("loss", "drafter"), [(0.96, LOOKUP), (0.94, "none")])
def test_a_drafter_may_lose_a_little_on_one_kind_of_text(loss: float, drafter: str) -> None:
    ratios = {QUESTIONS: {LOOKUP: (loss,) * 3}, EDITED: {LOOKUP: (1.5,) * 3}}
    assert chosen(swept(ratios))[ANY].drafter == drafter


def test_a_slow_cut_is_not_even_compared() -> None:
    """SmolLM2-135M's first ten layers: 27 tokens a second where plain decoding gives 78."""
    cut = CutFound(CUT, 27 / 78, "10-29")
    record = search(machine(STEEP, {CUT: Simulated(0.9, 3)}, cut_found=cut))
    assert CUT not in [contender.drafter for contender in record.contenders]
    assert any("0.35 times" in left.why for left in record.left_out)
    assert all(CUT not in sweep.works for sweep in record.sweeps)


def test_a_cut_that_promises_too_much_is_measured_and_not_chosen() -> None:
    slow = Simulated(0.3, 3, seconds=0.02)
    record = search(machine(FLAT, {CUT: slow}, cut_found=CutFound(CUT, 1.5, "3-5")))
    rows = {row.drafter: row for row in measured(record, 0.0, QUESTIONS)}
    assert rows[CUT].speed_up.value < 0.6
    assert CUT not in {choice.drafter for choice in chosen(record).values()}
    # It is so slow that one repetition was enough.
    assert rows[CUT].repetitions == 1
    assert rows[LOOKUP].repetitions == 3


def test_one_disturbed_repetition_drops_nobody() -> None:
    """Another program ran while prompt lookup answered: 0.6 times its speed. Twice is no accident,
    and half the speed is none either."""
    good, plain = Simulated(0.8, 4), Simulated()

    def left(*luck: float) -> bool:
        record = Record("basis", [Contender(LOOKUP, ""), Contender(SMALL, "")])
        for number, each in enumerate(luck):
            works = {PLAIN: plain.work(FLAT), SMALL: good.work(FLAT)}
            works[LOOKUP] = dataclasses.replace(good, luck=each).work(FLAT)
            record.sweeps.append(Sweep(0.0, QUESTIONS, number, works))
        return LOOKUP in hopeful(record, 0.0, [QUESTIONS])

    assert left(0.6)
    assert left(0.6, 1.0)
    assert not left(0.6, 0.6)
    assert not left(0.4)


def test_a_cut_is_searched_for_again_where_a_package_was_missing() -> None:
    class Without(SimulatedMachine):
        def cut(self, seconds: float) -> CutFound:
            self.called.append("cut")
            raise MissingPackageError("the search", "optuna", "tune")

    drafters = {QUESTIONS: {LOOKUP: SILENT}, EDITED: {LOOKUP: QUOTING}}
    record = search(Without(FLAT, drafters))
    assert any("optuna" in left.why for left in record.left_out)
    with_it = machine(FLAT, {CUT: Simulated(0.9, 3, seconds=0.004)})
    with_it.cut_found = CutFound(CUT, 1.5, "3-5")
    assert chosen(search(with_it, record=record))[QUESTIONS].drafter == CUT


def test_a_drafter_that_drafted_nothing_is_not_chosen_for_its_luck() -> None:
    record = search(machine(STEEP, {"lookahead": Simulated(luck=1.1)}))
    rows = {row.drafter: row.speed_up.value for row in measured(record, 0.0, QUESTIONS)}
    assert rows["lookahead"] == pytest.approx(1.1)
    assert chosen(record)[QUESTIONS].drafter == "none"
    assert "lookahead" not in {choice.drafter for choice in chosen(record).values()}


def test_a_choice_is_within_a_twentieth_of_the_best_of_a_grid() -> None:
    """Chains of 1 to 8 by drafters of 0.3 to 0.9, on both curves: the best is known."""
    for curve in (FLAT, STEEP):
        for acceptance in (0.3, 0.5, 0.7, 0.9):
            grid = {
                f'draft("small.gguf", n={n})': Simulated(acceptance, n, seconds=0.001 * n)
                for n in range(1, 9)
            }
            record = search(machine(curve, grid, found={SMALL_FILE: list(grid)}))
            found = chosen(record)[QUESTIONS]
            plain = Simulated().work(curve).tokens_per_second
            best = max(work.work(curve).tokens_per_second / plain for work in grid.values())
            assert found.speed_up >= 0.95 * max(1.0, best)
            assert (found.drafter == "none") == (best < 1.02)


def test_what_cannot_be_opened_is_left_out_with_its_reason() -> None:
    other = FoundDrafter(Path("odd.gguf"), "draft", "beside it")
    simulated = machine(
        FLAT,
        {SMALL: Simulated(fault="it needs 9 GiB of memory, and 8 GiB are allowed")},
        found={SMALL_FILE: [SMALL], other: OptionError("its vocabulary is another")},
    )
    record = search(simulated)
    reasons = {left.what: left.why for left in record.left_out}
    assert reasons[SMALL] == "it needs 9 GiB of memory, and 8 GiB are allowed"
    assert reasons["odd.gguf"] == "its vocabulary is another"
    assert "it has one layer" in reasons["a cut of the target's layers"]
    assert chosen(record)[EDITED].drafter == LOOKUP


def test_an_interrupted_search_keeps_what_is_known_and_goes_on() -> None:
    good = {SMALL: Simulated(0.8, 4, seconds=0.002)}
    whole = search(machine(FLAT, good, found={SMALL_FILE: [SMALL]}))
    simulated = machine(FLAT, good, found={SMALL_FILE: [SMALL]}, interrupt_at=3)
    record = Record("basis")
    with pytest.raises(KeyboardInterrupt):
        search(simulated, record=record)
    assert len(record.sweeps) == 3
    assert chosen(record)[QUESTIONS].drafter == SMALL
    # Through JSON, as a second call reads it.
    again = Record.read(record.to_dict(), "basis")
    simulated.called.clear()
    search(simulated, record=again)
    assert "plans small.gguf" not in simulated.called
    assert "cut" not in simulated.called
    assert len([name for name in simulated.called if name.startswith("sweep")]) == 3
    assert again == whole


def test_a_finished_search_measures_nothing_again() -> None:
    simulated = machine(FLAT, {SMALL: Simulated(0.8, 4)}, found={SMALL_FILE: [SMALL]})
    record = search(simulated)
    simulated.called.clear()
    search(simulated, record=record)
    assert simulated.called == ["curve"]


def test_a_drafter_that_appears_later_is_compared_in_full() -> None:
    simulated = machine(FLAT, {SMALL: Simulated(0.8, 4)})
    record = search(simulated)
    assert SMALL not in [row.drafter for row in measured(record, 0.0, QUESTIONS)]
    simulated.found = {SMALL_FILE: [SMALL]}
    search(simulated, record=record)
    assert chosen(record)[QUESTIONS].drafter == SMALL
    rows = {row.drafter: row.repetitions for row in measured(record, 0.0, QUESTIONS)}
    assert rows[SMALL] >= 2


def test_hours_train_a_head_once() -> None:
    simulated = machine(FLAT, {HEAD: Simulated(0.8, 5, seconds=0.001)}, trained=[HEAD])
    options = dataclasses.replace(OPTIONS, hours=2.0)
    record = search(simulated, options)
    assert chosen(record)[QUESTIONS].drafter == HEAD
    search(simulated, options, record)
    assert simulated.called.count("train 2") == 1


def test_a_head_that_cannot_be_trained_is_left_out_and_the_rest_is_compared() -> None:
    simulated = machine(FLAT, {SMALL: Simulated(0.8, 4)}, found={SMALL_FILE: [SMALL]})
    options = dataclasses.replace(OPTIONS, hours=2.0)
    record = search(simulated, options)
    assert "it cannot be trained" in {left.why for left in record.left_out}
    assert chosen(record)[QUESTIONS].drafter == SMALL
    search(simulated, options, record)
    assert simulated.called.count("train 2") == 2


@pytest.mark.parametrize("hours", [0.0, -1.0, float("nan"), float("inf")])
def test_no_hours_are_refused(hours: float) -> None:
    with pytest.raises(OptionError, match="hours are no time to train in"):
        dataclasses.replace(OPTIONS, hours=hours)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 240.0])
@pytest.mark.parametrize("drafter", [GOOD, SILENT], ids=["good", "silent"])
def test_a_search_takes_the_time_that_it_is_given(seconds: float, drafter: Simulated) -> None:
    """Within a fifth, whatever its steps take; estimates and the bar run as the clock does."""
    simulated = machine(FLAT, {SMALL: drafter}, found={SMALL_FILE: [SMALL]}, takes_all=True)
    options = dataclasses.replace(OPTIONS, repetitions=1000, seconds=seconds)
    told = told_by(simulated, options)
    end = simulated.clock
    assert end == pytest.approx(seconds, rel=0.2)
    for clock, status in told:
        assert clock + status.seconds_left == pytest.approx(end, rel=0.2)
    shares = [status.share for _, status in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_search_with_few_repetitions_tells_when_it_ends() -> None:
    """From the first sweep on, whose rate is measured."""
    simulated = machine(FLAT, {SMALL: GOOD}, found={SMALL_FILE: [SMALL]})
    options = dataclasses.replace(OPTIONS, repetitions=9)
    told = told_by(simulated, options)
    comparing = [each for each in told if each[1].what.startswith("comparing")]
    # Every other repetition is slowed by half, so that a rate of two is needed.
    for clock, status in comparing[4:]:
        assert clock + status.seconds_left == pytest.approx(simulated.clock, rel=0.25)


def test_training_comes_in_addition_to_the_time() -> None:
    simulated = machine(FLAT, {HEAD: GOOD}, trained=[HEAD], takes_all=True)
    options = dataclasses.replace(OPTIONS, hours=1.0, seconds=60.0, repetitions=1000)
    assert told_by(simulated, options)[0][1].seconds_left == 3660.0
    assert simulated.clock == pytest.approx(3660.0, abs=12.0)


def test_a_plan_that_there_is_no_time_for_is_made_by_another_call() -> None:
    files = {FoundDrafter(Path(f"{n}.gguf"), "draft", ""): [f'draft("{n}.gguf")'] for n in range(5)}
    simulated = machine(FLAT, {}, found=files, takes_all=True)
    options = dataclasses.replace(OPTIONS, seconds=60.0)
    record = search(simulated, options)
    left = [found.what for found in record.left_out if "give --seconds more" in found.why]
    assert left == ["3.gguf", "4.gguf"]
    search(simulated, options, record)
    assert not [found for found in record.left_out if "give --seconds more" in found.why]


def test_a_slow_machine_makes_one_sweep_and_says_that_it_is_not_all() -> None:
    simulated = machine(FLAT, {})
    record = search(simulated, dataclasses.replace(OPTIONS, repetitions=9, seconds=0.001))
    assert len(record.sweeps) == 1
    every = search(machine(FLAT, {}), dataclasses.replace(OPTIONS, repetitions=9))
    assert {sweep.repetition for sweep in every.sweeps} == set(range(9))
    assert len(every.sweeps) == 2 * 9


def test_progress_names_the_step_and_the_best_so_far() -> None:
    told = told_by(machine(FLAT, {SMALL: GOOD}, found={SMALL_FILE: [SMALL]}))
    last = [status for _, status in told if status.what.startswith("comparing")][-1]
    assert last.seconds_left > 0.0
    assert "times plain" in last.best


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(basis="another"),
        lambda content: content.update(sweeps={}),
        lambda content: content.pop("sweeps"),
        lambda content: content.pop("contenders"),
        lambda content: content["sweeps"][0]["works"].pop("none"),
        lambda content: content["sweeps"][0]["works"]["none"].update(tokens=0),
        lambda content: content["sweeps"][0]["works"]["none"].update(seconds="fast"),
        lambda content: content["contenders"].append({"drafter": 3, "source": ""}),
    ],
)
def test_a_damaged_record_is_begun_anew(damage: object) -> None:
    record = search(machine(FLAT, {}))
    assert Record.read(record.to_dict(), "basis") == record
    content = record.to_dict()
    damage(content)  # type: ignore[operator]
    assert Record.read(content, "basis") == Record("basis")
