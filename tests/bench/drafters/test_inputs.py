"""Inputs of measurements: prompts, parameter counts, drafter expressions, padded targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.bench.drafters.comparison import DrafterBench, with_files
from specrun.bench.drafters.pair_theory import curve_of
from specrun.bench.drafters.prompts import demo_prompts, read_prompts
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert.cut.pad import padded_target, parse_parameters
from specrun.runtime.demo import demo_questions
from specrun.runtime.language import parse_expression
from specrun.runtime.laws import SamplingParams


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("400M", 400_000_000),
        ("1.5B", 1_500_000_000),
        ("12k", 12_000),
        ("77", 77),
        (" 2 G ", 2 * 10**9),
    ],
)
def test_parameter_counts(text: str, count: int) -> None:
    assert parse_parameters(text) == count


@pytest.mark.parametrize("text", ["", "M", "0", "-5M", "4T", "1e9", "400 000"])
def test_bad_parameter_counts(text: str) -> None:
    with pytest.raises(OptionError, match=f"^'{text}' (is not a number of )?parameters"):
        parse_parameters(text)


def test_prompts_of_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo é\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        '{"question": "q?", "answer": "a"}\n\n{"prompt": "p"}\n', encoding="utf-8"
    )
    assert read_prompts(tmp_path / "a.txt") == ("one", "two é")
    assert read_prompts(tmp_path / "b.jsonl") == ("q?", "p")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("a.txt", b"\n \n", OptionError),
        ("a.txt", b"\xff\xfe", ModelError),
        ("a.jsonl", b"{", ModelError),
        ("a.jsonl", b"[1]", ModelError),
        ("a.jsonl", b'{"prompt": 3}', ModelError),
    ],
)
def test_bad_prompt_files(
    tmp_path: Path, name: str, content: bytes, error: type[Exception]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name):
        read_prompts(tmp_path / name)


def test_a_missing_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError):
        read_prompts(tmp_path / "none.txt")


def test_demo_questions_are_spread_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(f'{{"question": "q{n}"}}\n' for n in range(10)), encoding="utf-8")
    monkeypatch.setattr("specrun.bench.drafters.prompts.demo_questions", lambda: file)
    assert demo_questions() != file
    assert demo_prompts(3) == ("q0", "q3", "q6")
    assert len(demo_prompts(99)) == 10


def test_left_out_files_are_filled_in() -> None:
    files = {"draft": Path("/models/a b.gguf")}
    filled = parse_expression(with_files("draft(n=3)", files))
    assert (filled.arguments[0].atom, str(filled.options[0][1])) == ("/models/a b.gguf", "3")
    assert parse_expression(with_files("draft", files)).arguments[0].atom == "/models/a b.gguf"
    assert with_files("draft(other.gguf, n=3)", files) == "draft(other.gguf, n=3)"
    assert with_files("prompt-lookup", files) == "prompt-lookup"
    assert with_files("prompt-lookup(n=draft)", files) == "prompt-lookup(n=draft)"


def test_padding_costs_more_and_is_taken_away(tiny_model: Path) -> None:
    with padded_target(tiny_model, None) as path:
        assert path == tiny_model
    with padded_target(tiny_model, 100_000) as path:
        assert read_header(path).n_parameters == pytest.approx(100_000, rel=0.5)
        assert read_header(path).n_parameters > read_header(tiny_model).n_parameters
    assert not path.exists()


def test_padding_is_kept_where_asked(tiny_model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "padded.gguf"
    with padded_target(tiny_model, 100_000, keep=kept) as path:
        assert path == kept
    assert kept.is_file()
    with (
        pytest.raises(OptionError, match="already exists"),
        padded_target(tiny_model, 100_000, keep=kept),
    ):
        pass


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"drafters": ()}, "no drafters are given"),
        ({"prompts": ()}, "no prompts are given"),
        ({"params": ()}, "no params are given"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"repetitions": 0}, "repetitions is 0"),
    ],
)
def test_nothing_to_measure_is_refused(wrong: dict[str, object], problem: str) -> None:
    good: dict[str, object] = {
        "drafters": ("none",),
        "prompts": ("p",),
        "params": (SamplingParams(),),
    }
    with pytest.raises(OptionError, match=problem):
        DrafterBench(Path("target.gguf"), **{**good, **wrong})


def test_curves_are_named_or_listed(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        assert curve_of("1:1,2:1.5", model.path, ContextOptions(), 0).seconds(2) == 1.5
        gpu, cpu = (curve_of(name, model.path, ContextOptions(), 0) for name in ("gpu", "cpu"))
        assert gpu.seconds(8) < cpu.seconds(8)
        for wrong, problem in (
            ("fast", "'fast' is no cost curve"),
            ("1:1,1:2", "start at 1 and ascend"),
            ("2:1", "start at 1 and ascend"),
            ("1:-1", "are positive"),
            ("1", "'1' is no cost curve"),
            ("", "'' is no cost curve"),
        ):
            with pytest.raises(OptionError, match=problem):
                curve_of(wrong, model.path, ContextOptions(), 0)
