"""A head within so many hours: when answers are enough, how many steps fit, and going on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from specrun.bench.accelerate import AccelerateOptions, candidates, kinds, training
from specrun.bench.accelerate.candidates import Candidates, method_of_file
from specrun.bench.accelerate.kinds import HeadAccount
from specrun.bench.accelerate.prompts import search_prompts
from specrun.bench.accelerate.target import SearchTarget
from specrun.bench.accelerate.training import (
    ANSWERING,
    ANSWERING_WITH_STATES,
    Hours,
    PlanKnown,
    TrainingOrder,
    TrainingPlan,
    _asked,
    _beginning,
    _dearer,
    _rate,
    _recipe,
    train_head,
)
from specrun.bindings.errors import OptionError, SpecrunError, TemplateError
from specrun.bindings.gguf import read_header
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.demo import demo_target
from specrun.runtime.models import shipped_heads
from specrun.runtime.planning import CostCurve
from specrun.runtime.planning.theory import multiplications_of
from specrun.train.heads import Eagle3Recipe
from specrun.train.target.shape import ModelShape
from specrun.train.trainer import TrainingStatus

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_cache")]

PLAN = TrainingPlan("eagle", 1.0, 2000)


@pytest.fixture
def target(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy2(tiny_model, tmp_path / "target.gguf"))


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def status(step: int) -> TrainingStatus:
    return TrainingStatus(step, 10, 1.0, {}, 1.0, 1.0)


@pytest.mark.parametrize(("answering", "end"), [(ANSWERING, 1188.0), (ANSWERING_WITH_STATES, 1800)])
def test_answers_end_after_a_third_of_the_time_or_half(answering: float, end: float) -> None:
    clock = Clock()
    hours = Hours(3600.0, PLAN, clock, answering=answering)
    hours.stage("the target answers", 100, 2000)
    hours.stage("states", 1, 2)
    clock.now = end - 1.0
    hours.stage("the target answers", 600, 2000)
    clock.now = end + 1.0
    hours.stage("states", 2, 2)
    hours.stage("the target answers", 8, 2000)  # too few to learn from
    with pytest.raises(PlanKnown) as enough:
        hours.stage("the target answers", 700, 2000)
    assert enough.value.counts == {"n_prompts": 700}
    hours.stage("the target answers", 2000, 2000)  # all of them


def test_tries_at_prompts_end_after_a_tenth_of_the_time() -> None:
    clock = Clock()
    hours = Hours(3600.0, PLAN, clock)
    clock.now = 359.0
    hours.stage("the target asks", 300, 2000)
    clock.now = 361.0
    hours.stage("the target asks", 2000, 2000)  # all of them
    with pytest.raises(PlanKnown) as enough:
        hours.stage("the target asks", 301, 2000)
    assert enough.value.counts == {"n_tries": 301}


def test_prompts_are_the_users_then_by_turns_the_targets_own_and_built_in_ones(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_own", lambda *_: ["own 1", "own 2"])
    monkeypatch.setattr(training, "_built_in", lambda _count: ["built 1", "built 2", "built 3"])
    wanted = order(target, prompts=("mine",))
    wanted.folder.mkdir(parents=True)
    hours = Hours(3600.0, PLAN, Clock())
    every = ["mine", "own 1", "built 1", "own 2", "built 2", "built 3"]
    for given, count in ((PLAN, 6), (TrainingPlan("eagle", 1.0, 2, n_prompts=4), 4)):
        plan = _asked(wanted, given, hours)
        assert plan.n_prompts == count
        lines = (wanted.folder / "prompts.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == every[:count]
    assert _asked(wanted, TrainingPlan("eagle", 1.0, 0), hours).n_prompts == 1  # no template


@pytest.mark.parametrize("dearer", [1.0, 1.25])
def test_the_steps_are_those_that_fit_into_what_is_left(dearer: float) -> None:
    clock = Clock()
    hours = Hours(3600.0, PLAN, clock, dearer)
    clock.now = 1590.0
    with pytest.raises(PlanKnown) as known:
        for step in range(1, 200):
            clock.now += (
                5.0 if step < 3 else 0.4 if step < 20 else 0.6
            )  # the first ones take longer
            hours.status(status(step))
    # Half a minute of steps tells; of what is left then all but a tenth is for steps of that time.
    assert 10.0 + 30.0 < clock.now - 1590.0 < 10.0 + 35.0
    left = 3600.0 - clock.now
    assert 0.9 * left / (0.57 * dearer) < known.value.counts["steps"] < 0.9 * left / (0.5 * dearer)


def test_an_earlier_calls_time_counts() -> None:
    clock = Clock()
    plan = TrainingPlan("eagle", 1.0, 0, 2000, steps=500, spent=1800.0)
    hours = Hours(3600.0, plan, clock)
    clock.now = 100.0
    assert hours.spent == 1900.0
    for step in range(30):
        hours.status(status(step))  # the steps are known


def order(target: Path, hours: float = 0.0005, **changes: object) -> TrainingOrder:
    return TrainingOrder(target, hours, n_threads=1, **changes)  # type: ignore[arg-type]


def test_a_training_goes_on_after_ctrl_c_and_its_head_drafts_and_is_learnt_on_from(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LONGEST_ANSWER", 24), ("TOKENS_PER_BATCH", 64)):
        monkeypatch.setattr(training, f"_{name}", value)
    monkeypatch.setattr(training, "_FEWEST_STEPS", 4)

    stage, said = Hours.stage, list[tuple[str, int]]()
    wanted = order(target, prompts=("abc", "hello"))
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patched:

        def interrupt(hours: Hours, what: str, done: int, total: int) -> None:
            if (what, done) == ("the target answers", 16):
                raise KeyboardInterrupt
            stage(hours, what, done, total)

        patched.setattr(Hours, "stage", interrupt)
        train_head(wanted)

    def noted(hours: Hours, what: str, done: int, total: int) -> None:
        said.append((what, done))
        stage(hours, what, done, total)

    monkeypatch.setattr(Hours, "stage", noted)
    answers = wanted.folder / "training" / "training" / "answers.jsonl"
    kept = answers.read_text().splitlines()
    assert len(kept) == 16
    head = train_head(wanted)
    assert answers.read_text().splitlines()[:16] == kept
    assert ("the target answers", 16) not in said
    assert method_of_file(head) == "eagle3"
    lines = (head.parent / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines][:2] == ["abc", "hello"]
    plan = json.loads((head.parent / "plan.json").read_text())["plan"]
    assert 4 <= plan["steps"] < 1_000_000
    with Runtime(target, f'eagle3("{head}", n=2)', n_threads=1, trust=True) as runtime:
        drafted = runtime.generate("abc", SamplingParams(temperature=0.0), max_tokens=16)
    with Runtime(target, "none", n_threads=1, trust=True) as runtime:
        plain = runtime.generate("abc", SamplingParams(temperature=0.0), max_tokens=16)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0
    said.clear()
    assert train_head(wanted) == head
    assert said == []
    # The first head that was made for this target's sizes is learnt on from: not one for others.
    earlier = Path(shutil.copy2(head, target.with_name("earlier.gguf")))
    (shipped,) = shipped_heads()
    second = order(target, 0.0006, prompts=("abc", "hello"), earlier=(shipped, earlier))
    assert method_of_file(train_head(second)) == "eagle3"
    plan = json.loads((second.folder / "plan.json").read_text())["plan"]
    assert plan["earlier"] == str(earlier)
    assert "earlier.gguf" in (second.folder / "training" / "README.md").read_text()


def test_what_is_learnt_goes_by_the_hours_where_steps_are_dear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EAGLE-3 of a narrow target in any time, of a wide one on a CPU in half a day."""
    monkeypatch.setattr(
        "specrun.train.trainer.settings.usable_device", lambda _: torch.device("cpu")
    )
    target, narrow = demo_target(), TrainingPlan("eagle3", 0.1, 0)
    assert _beginning(order(target, 0.1)) == ("eagle3", "")
    recipe = _recipe(order(target), narrow)
    assert isinstance(recipe, Eagle3Recipe)
    assert (recipe.steps, recipe.late_steps) == (2, 4)
    assert (recipe.draft_tokens, recipe.law_tokens) == (12288, 8192)
    assert _dearer(order(target), narrow) > 1.0
    assert _dearer(order(target), replace(narrow, earlier="head.gguf")) == 1.0
    assert _rate(order(target), narrow) == pytest.approx(0.576 / 256)
    monkeypatch.setattr(training, "_NARROW", 256)
    assert _beginning(order(target, 11.9)) == ("eagle", "")
    assert _beginning(order(target, 12.0)) == ("eagle3", "")
    assert _recipe(order(target), narrow) == Eagle3Recipe()
    assert _dearer(order(target), narrow) == 1.0
    assert _rate(order(target), narrow) is None


def test_without_a_template_beginnings_are_needed(tiny_small_vocab: Path, tmp_path: Path) -> None:
    target = Path(shutil.copy2(tiny_small_vocab, tmp_path / "plain.gguf"))
    with pytest.raises(TemplateError, match="has no chat template"):
        train_head(order(target, prompts=("a", "b")))


def test_what_no_head_can_be_trained_for_is_said(tmp_path: Path) -> None:
    from support.tiny_mamba import write_tiny_mamba

    target = write_tiny_mamba(tmp_path / "mamba.gguf")
    with pytest.raises(SpecrunError):
        train_head(order(target))
    with pytest.raises(OptionError, match="holds no heads"):
        method_of_file(target)


# -- EAGLE-3 or a block drafter --------------------------------------------------------------------

FLAT, STEEP = CostCurve.flat([1.0] * 16), CostCurve.flat([1.0, 1.1, 1.3, 1.5, 1.8, 2.2, 2.6, 3.0])
SHAPE = ModelShape(hidden=8, n_layers=4, n_heads=2, n_kv_heads=1, feed_forward=16, vocab_size=100)


def account(curve: CostCurve, drafted: int, target: Path) -> HeadAccount:
    return HeadAccount(SHAPE, multiplications_of(target, read_header(target)), curve, drafted, 1)


def test_the_account_of_a_head_is_that_of_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, of chains of one token: a target of 10,000 multiplications, heads of 50 tokens."""
    found = HeadAccount(SHAPE, 10_000.0, STEEP, 50, 2)
    monkeypatch.setattr(kinds, "_RIGHT", {"eagle3": (0.5,), "dflash": (0.4,)})
    layer = 8 * (8 + 8) + 8 * 8 + 3 * 8 * 16
    eagle = (layer + 8 * (8 + 8) + 50 * 8) / 10_000
    block = 1.1 * (2 * layer + 50 * 8) / 10_000
    assert found.speed_up("eagle3") == pytest.approx(1.5 / (1.1 + eagle))
    assert found.speed_up("dflash") == pytest.approx(1.4 / (1.1 + block))
    assert found.faster == "eagle3"


def test_the_faster_kind_goes_by_what_drafts_cost(target: Path) -> None:
    """EAGLE-3 where a token of a draft costs little, a block drafter where it costs much."""
    assert account(FLAT, 100, target).faster == "dflash"
    assert account(FLAT, 0, target).speed_up("dflash") > account(FLAT, 100, target).speed_up(
        "dflash"
    )
    large = replace(SHAPE, hidden=4, feed_forward=1)
    cheap = replace(account(FLAT, 1, target), shape=large)
    assert cheap.faster == "eagle3"


def test_a_block_drafter_is_trained_and_drafts(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LONGEST_ANSWER", 24), ("TOKENS_PER_BATCH", 64), ("FEWEST_STEPS", 4)):
        monkeypatch.setattr(training, f"_{name}", value)
    dear = CostCurve.flat([1.0] * 16)
    wanted = order(target, prompts=("abc", "hello"), curve=dear)
    assert _beginning(wanted) == ("dflash", "")
    head = train_head(wanted)
    assert method_of_file(head) == "dflash"
    assert train_head(wanted) == head  # the plan is read again
    with Runtime(target, f'dflash("{head}", n=2)', n_threads=1, trust=True) as runtime:
        drafted = runtime.generate("abc", SamplingParams(temperature=0.0), max_tokens=16)
    with Runtime(target, "none", n_threads=1, trust=True) as runtime:
        plain = runtime.generate("abc", SamplingParams(temperature=0.0), max_tokens=16)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.drafted > 0


def test_the_search_hands_on_the_measured_curve(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[TrainingOrder]()

    def train(given: TrainingOrder) -> Path:
        asked.append(given)
        raise OptionError("enough")

    monkeypatch.setattr(candidates, "train_head", train)
    options = AccelerateOptions(target, (SamplingParams(temperature=0.0),), hours=1.0)
    found = SearchTarget(options, search_prompts(None))
    found.curve = STEEP
    with pytest.raises(OptionError, match="enough"):
        Candidates(found).train(1.0)
    assert asked[0].curve is STEEP
