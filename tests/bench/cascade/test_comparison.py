"""Comparison of cascades on tiny models: measures, results after Ctrl-C, best points."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest
from support.commands import results_of, run

from specrun.bench.cascade.comparison import (
    CascadeBench,
    CascadePoint,
    best_points,
    measure_cascades,
    metric_of,
    settings_of,
    with_alphas,
)
from specrun.bench.cascade.examples import Example
from specrun.bench.timing import Ratio, spread_of
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.runtime.laws import SamplingParams

WARM = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
EXAMPLES = (
    Example("the quick brown fox", " jumps over the dog", is_answer=False),
    Example("one two three", " four five six", is_answer=False),
)


def test_alphas_go_to_rules_that_take_them():
    assert with_alphas(["cascade-opt", "exact", "lossy(alpha=0.2, beta=solve)"], [0.0, 0.5]) == (
        *("cascade-opt(alpha=0)", "cascade-opt(alpha=0.5)"),
        *("exact", "lossy(alpha=0.2, beta=solve)"),
    )
    # The distance of a token of probability 1 - alpha; of probability 0 there is none.
    assert with_alphas(["bild-star"], [0.0, 0.5, 1.0]) == (
        *("bild-star(rollback=0)", "bild-star(rollback=0.6931)"),
    )
    for wrong in ("cascade-opq", "token-cascade"):
        with pytest.raises(OptionError, match=r"did you mean|give 0 to 1"):
            with_alphas([wrong], [2.0])


@pytest.fixture
def bench(tiny_model, tiny_flat_twin) -> CascadeBench:
    return CascadeBench(
        target=tiny_model,
        teacher=tiny_model,
        small=tiny_flat_twin,
        examples=EXAMPLES,
        rules=("cascade-diff(alpha=0.3)", "token-cascade(alpha=0.7)", "sequence-cascade(alpha=0)"),
        params=(WARM,),
        lengths=(3,),
        max_tokens=12,
        repetitions=2,
        as_chat=False,
        options={"context": ContextOptions(n_ctx=256, n_threads=1)},
    )


def by_method(points) -> dict[str, CascadePoint]:
    return {point.method: point for point in points}


def test_every_rule_is_measured_with_both_models_alone(bench):
    found = by_method(measure_cascades(bench).points)
    assert [*found] == [
        *("plain target", "plain small", "exact", "cascade-diff", "token-cascade"),
        *("sequence-cascade", "oracle-cascade"),
    ]
    plain, exact, diff = found["plain target"], found["exact"], found["cascade-diff"]
    assert (plain.latency.value, plain.speed_up, plain.draft_length) == (1.0, 1.0, None)
    assert [point.exact for point in found.values()] == [True, False, True, *[False] * 4]
    assert exact.cross_entropy == plain.cross_entropy != diff.cross_entropy
    assert 0.0 < diff.rejection_rate < 1.0
    assert 0.0 < diff.deferral_rate < exact.deferral_rate == 1.0
    assert (exact.total_variation, diff.total_variation > 0.0) == (None, True)
    assert found["token-cascade"].rejection_rate is None
    assert found["sequence-cascade"].cross_entropy is None
    oracle = found["oracle-cascade"]
    assert (oracle.cross_entropy, oracle.deferral_rate) == (diff.cross_entropy, diff.deferral_rate)
    assert (oracle.latency, oracle.rule) == (None, "oracle-cascade(alpha=0.3)")
    assert diff.rouge_2 is None  # the text only went on so
    assert diff.seconds_per_token.n == 2


def test_ctrl_c_keeps_whole_repetitions(bench):
    asked = len(EXAMPLES) * (3 + len(bench.rules))

    def press(done: int, _total: int, _what: str) -> None:
        if done > asked + 3:
            raise KeyboardInterrupt

    kept = measure_cascades(bench, progress=press)
    assert kept.interrupted
    assert {point.repetitions for point in kept.points} == {1}
    assert len(kept.points) == 7

    def at_once(done: int, _total: int, _what: str) -> None:
        if done > 3:
            raise KeyboardInterrupt

    assert measure_cascades(bench, progress=at_once).points == []


def test_nothing_to_measure_is_refused(bench):
    for change in ({"examples": ()}, {"rules": ()}, {"repetitions": 0}):
        with pytest.raises(OptionError, match=r"nothing to measure|give at least 1"):
            dataclasses.replace(bench, **change)


# -- the best of them ------------------------------------------------------------------------------


def point(method: str, rouge: list[float] | None, speed: float, **others) -> CascadePoint:
    values = {
        **dict.fromkeys(field.name for field in dataclasses.fields(CascadePoint)),
        "method": method,
        "rule": f"{method}({speed})",
        "temperature": 1.0,
        "top_p": 1.0,
        "draft_length": None if method.startswith("plain") else 5,
        "latency": Ratio(1 / speed, 1 / speed, 1 / speed),
        "speed_up": speed,
        "rouge_2": None if rouge is None else spread_of(rouge),
        "expected_accuracy": 0.5,
    }
    return CascadePoint(**{**values, **others})


def test_the_fastest_as_good_and_the_best_as_fast():
    points = [
        point("plain target", [0.50, 0.52, 0.48], 1.0),
        point("exact", [0.50, 0.52, 0.48], 1.5),
        point("a", [0.50, 0.51, 0.52], 2.0),
        point("a", [0.20, 0.20, 0.20], 3.0),
        point("a", [0.90, 0.90, 0.90], 0.8),
        point("b", [0.1, 0.1, 0.1], 4.0),
    ]
    assert settings_of(points) == [(1.0, 1.0, 5)]
    found = {best.method: best for best in best_points(points)}
    assert [*found] == ["exact", "a", "b"]
    assert found["a"].fastest.speed_up == 2.0
    assert found["a"].over_exact == pytest.approx(2.0 / 1.5)
    assert found["a"].best.speed_up == 2.0  # the better one is slower than the target
    assert found["b"].fastest is None
    assert found["b"].best.speed_up == 4.0


def test_of_cross_entropies_the_lower_is_better_and_doubt_is_that_of_the_difference():
    def told(method: str, value: float, speed: float, excess: list[float]) -> CascadePoint:
        spreads = {"cross_entropy": spread_of([value - 1.0, value, value + 1.0])}
        return point(method, None, speed, excess_cross_entropy=spread_of(excess), **spreads)

    points = [
        told("plain target", 3.0, 1.0, [0.0, 0.0, 0.0]),
        told("exact", 3.0, 1.5, [0.0, 0.0, 0.0]),
        told("sure", 3.1, 2.0, [0.09, 0.10, 0.11]),
        told("doubtful", 3.1, 2.0, [-0.2, 0.1, 0.4]),
        told("better", 2.9, 1.2, [-0.1, -0.1, -0.1]),
    ]
    assert metric_of(points) == "cross_entropy"
    found = {best.method: best for best in best_points(points)}
    # Texts differ by far more than rules do: pairs show differences that their spread would hide.
    assert found["sure"].fastest is None
    assert found["doubtful"].fastest is not None
    assert found["better"].fastest is not None
    assert metric_of([*points, point("sequence-cascade", None, 1.0, expected_accuracy=None)]) == (
        "cross_entropy"
    )
    assert metric_of([*points, point("truncated", None, 1.0)]) == "expected_accuracy"
    other = {best.method: best for best in best_points(points, "expected_accuracy")}
    assert other["sure"].fastest.speed_up == 2.0  # all foretell alike


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tiny_model, tiny_flat_twin, tmp_path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog again and again\n" * 12)
    quick = "bench cascade -t 1 -c 512 -n 8 -r 1 --examples 2 --spec-draft-n-max 3 --alpha 0.3"
    models = ["-m", str(tiny_model), "-md", str(tiny_flat_twin), "--texts", str(text)]
    return [*quick.split(), *models, "--accept", "cascade-opt"]


def test_the_command_prints_all_forms_and_draws(command, tmp_path):
    picture = tmp_path / "c.png"
    done = run("", *command, "--temp", "0,1", "--top-p", "0.9", "--plot", picture, "--json")
    found = results_of(done)
    assert json.loads(done.stdout)["bench"] == "cascade"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [(one["rule"], one["temperature"]) for one in found if one["draft_length"]] == [
        (rule, temperature)
        for temperature in (0.0, 1.0)
        for rule in ("exact", "cascade-opt(alpha=0.3)")
    ]
    assert {one["top_p"] for one in found} == {0.9}
    rows = list(csv.DictReader(io.StringIO(run("", *command, "-o", "csv").stdout)))
    assert [row["method"] for row in rows] == [
        "plain target",
        "plain small",
        "exact",
        "cascade-opt",
    ]
    markdown = run("", *command, "--quality", "expected_accuracy").stdout
    assert "| expected-accuracy |" in markdown
    assert "| cascade-opt(alpha=0.3)" in markdown
    assert "NOT exact" in markdown
    assert "| speed-up at it" in markdown


@pytest.mark.parametrize(
    ("more", "code", "problem"),
    [
        (["--accept", "cascade-opp"], 2, "did you mean 'cascade-opt'"),
        (["--accept", "lossy", "--alpha", "1"], 2, "lossy: alpha is 1"),
        (["--plot", "p.txt"], 2, "name it .png"),
        (["--texts", "none.txt"], 3, "none.txt"),
        (["--top-p", "2"], 2, "top_p is 2"),
    ],
)
def test_bad_input_ends_with_a_sentence(command, more, code, problem):
    done = run("", *command, *more)
    assert (done.exit_code, done.stdout) == (code, "")
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_a_small_model_and_texts_are_asked_for(tiny_model, tiny_flat_twin):
    alone = run("bench cascade -m", tiny_model)
    assert (alone.exit_code, "-md FILE" in alone.stderr) == (2, True)
    without = run("bench cascade -m", tiny_model, "-md", tiny_flat_twin)
    assert (without.exit_code, "--texts FILE" in without.stderr) == (2, True)


def test_answers_of_the_demo_are_scored(command, tiny_model, tiny_flat_twin, tmp_path):
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    lines = tmp_path / "q.jsonl"
    lines.write_text('{"question": "who?", "answer": "nobody at all"}\n' * 2, encoding="utf-8")
    found = results_of(run("", *command, "--texts", lines, "--json"))
    assert all(one["rouge_2"]["n"] == 1 for one in found)
    assert all(one["exact_match"]["mean"] == 0.0 for one in found)
