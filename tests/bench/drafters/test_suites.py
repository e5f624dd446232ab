"""Suites: their forms, questions of several turns, results by category, and scores."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from specrun.bench.drafters.comparison import DrafterBench, measure_drafters
from specrun.bench.drafters.prompts import Question
from specrun.bench.drafters.scores import FinalNumber, Scorer, Tests, Texts, final_number, passes
from specrun.bench.drafters.suites import OWN, has_programs, read_suite
from specrun.bench.report import drafters_table, to_csv, to_json
from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import FileMissingError, ModelError, OptionError
from specrun.runtime.engine import Runtime
from specrun.runtime.laws import SamplingParams

HUMAN_EVAL = {
    "task_id": "T/0",
    "prompt": 'import math\n\ndef double(x):\n    """Return twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}
MBPP = {"text": "Add.", "code": "", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}


def suite(folder: Path, *records: object, name: str = "suite.jsonl") -> tuple[Question, ...]:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return read_suite(str(path))


@pytest.mark.parametrize(
    ("record", "category", "turns", "metric"),
    [
        ({"question_id": 1, "category": "writing", "turns": ["a", "b"]}, "writing", 2, None),
        ({"category": "qa", "turns": ["a"], "reference": ["x", "y"]}, "qa", 1, "F1"),
        ({"turns": ["a"], "reference": ["so\n#### 8"]}, "suite", 1, "exact match"),
        (HUMAN_EVAL, "HumanEval", 1, "pass@1"),
        (MBPP, "MBPP", 1, "pass@1"),
        ({"prompt": "Add.", "test_list": MBPP["test_list"]}, "MBPP", 1, "pass@1"),
        ({"question": "q", "answer": "3 + 4\n#### 7"}, "GSM8K", 1, "exact match"),
        ({"instruction": "i", "input": "", "output": "o"}, "Alpaca", 1, "F1"),
    ],
)
def test_forms_are_recognised_by_their_fields(
    tmp_path: Path, record: dict[str, Any], category: str, turns: int, metric: str | None
) -> None:
    (question,) = suite(tmp_path, record)
    assert (question.category, len(question.turns)) == (category, turns)
    known = [each.metric for each in question.references if each is not None]
    assert known == ([metric] if metric else [])


def test_arrays_folders_and_lengths(tmp_path: Path) -> None:
    (tmp_path / "array.json").write_text(
        json.dumps([{"instruction": "Shorten.", "input": "long", "output": ""}]), encoding="utf-8"
    )
    (alpaca,) = read_suite(str(tmp_path / "array.json"))
    assert alpaca.turns == ("Shorten.\n\nlong",)
    assert alpaca.references == ()
    folder = tmp_path / "sum"
    folder.mkdir()
    eagle, speed = suite(
        folder, {"turns": ["a"]}, {"turns": ["b"], "difficulty": "x"}, name="question.jsonl"
    )
    assert (eagle.category, eagle.by_length, speed.by_length) == ("sum", False, True)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names")
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "questions.jsonl"
    os.mkfifo(pipe)
    written = json.dumps({"question_id": 1, "category": "writing", "turns": ["a"]})
    writer = threading.Thread(target=pipe.write_text, args=(written,), daemon=True)
    writer.start()
    found: list[Question] = []
    reader = threading.Thread(
        target=lambda: found.extend(read_suite(str(pipe))), daemon=True
    )  # would wait for ever for a second writer
    reader.start()
    reader.join(20.0)
    assert [question.turns for question in found] == [("a",)]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"prompt": "p"}', "line 1 has the fields prompt, which no known suite has"),
        ("[1]", "record 1 has no fields"),
        ("{", "line 1 is not JSON"),
        ('{"turns": []}', "turns holds no text"),
        ('{"turns": [3]}', "turns is no list of texts"),
        ('{"question": "q", "answer": "7"}', "answer has no number after ####"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=problem):
        read_suite(str(path))


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no questions"):
        suite(tmp_path)
    with pytest.raises(FileMissingError):
        read_suite(str(tmp_path / "none"))


def test_our_own_suite_has_forty_questions_in_five_categories() -> None:
    questions = read_suite(OWN)
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    sizes = {category: len(own) for category, own in by_category.items()}
    assert sizes == dict.fromkeys(("questions", "code", "edits", "summaries", "chats"), 8)
    assert len({question.turns for question in questions}) == 40
    assert all(len(question.turns) == 2 for question in by_category["chats"])
    assert all(question.references for question in by_category["edits"])
    assert len(read_suite(OWN, 3)) == 15


# == Scores ========================================================================================


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("It is $1,234.50 in all", "1234.50"),
        ("#### 12 (of 13)", "12"),
        ("from 10-5", "5"),
        ("the answer is \N{MINUS SIGN}5", "-5"),
        ("\\boxed{18}", "18"),
        ("none", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    found = final_number(text)
    assert (None if found is None else str(found)) == number


def test_numbers_are_equal_by_value_and_texts_by_words() -> None:
    number = final_number("18")
    assert number is not None
    assert FinalNumber(number).score("It is 18.00") == 1.0
    assert FinalNumber(number).score("It is 19") == 0.0
    assert FinalNumber(number).score("18.\n\nQuestion: How much is 2 + 3?") == 1.0
    # Two of three words are among the reference's four: F1 = 2 * 2 / (3 + 4).
    texts = Texts(("nothing", "The red car stops here"))
    assert texts.score("a red car drives") == pytest.approx(4 / 7)
    assert texts.score("") == 0.0
    assert Texts(("水が冷たい",)).score("水") == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("answer", "passed"),
    [
        ("    return 2 * x\n\nprint(double(", True),  # a text that goes on
        ("Here:\n```python\ndef double(x):\n    return x + x\n```\nIt adds.", True),
        ("```\n    return x * 2\n```", True),
        ("def double(x):\n    return x * 2\n\nThis function doubles x.", True),
        ("    return 2 * x\n```\n\nIt doubles `x`.", True),  # a fence that none opened
        ("\ndef double(x):\n    return 2 * x\n```\nIt doubles.", True),
        ("    return x", False),
        ("    import sys\n    sys.exit(0)", False),  # leaving early is no success
        ("I cannot do that.", False),
    ],
)
def test_programs_of_answers(tmp_path: Path, answer: str, passed: bool) -> None:
    (question,) = suite(tmp_path, HUMAN_EVAL)
    assert Scorer(run_code=True).score(question.references[0], answer) == float(passed)


def test_programs_are_limited_and_run_only_when_asked() -> None:
    assert passes("x = 1")
    assert not passes("x = [0] * 10**9")
    assert not passes("while True: pass", seconds=1.0)
    assert not passes("open('big', 'wb').write(bytes(2**21))")
    tests = Tests("assert add(1, 2) == 3")
    assert Scorer(run_code=False).score(tests, "def add(a, b): return a + b") is None
    assert Scorer(run_code=True).score(tests, "def add(a, b): return a + b") == 1.0


# == Results =======================================================================================


def test_results_by_category_with_turns_and_scores(tiny_model: Path) -> None:
    options = {"context": ContextOptions(n_ctx=256, n_threads=1), "trust": True}
    greedy = SamplingParams(temperature=0.0)
    with Runtime(tiny_model, "none", **options) as runtime:
        first = runtime.generate("abc", greedy, max_tokens=6).text
    prompts = (
        Question("chats", ("abc", "more")),
        Question("edits", ("abc",), (Texts((first,)),)),
    )
    assert not has_programs(prompts)
    bench = DrafterBench(
        tiny_model,
        ("prompt-lookup",),
        prompts,
        (greedy,),
        max_tokens=6,
        repetitions=2,
        as_chat=False,
        options=options,
    )
    results = measure_drafters(bench)
    assert [(each.category, each.drafter, each.n_prompts) for each in results] == [
        ("", "none", 2),
        ("", "prompt-lookup", 2),
        ("chats", "none", 1),
        ("chats", "prompt-lookup", 1),
        ("edits", "none", 1),
        ("edits", "prompt-lookup", 1),
    ]
    everything, chats, edits = results[1], results[3], results[5]
    assert everything.tokens == chats.tokens + edits.tokens
    assert everything.text is not None
    assert everything.text.n_prompts == everything.text.n_same == 3  # answers: two turns and one
    assert (edits.metric, edits.score, chats.score) == ("F1", 1.0, None)
    table = drafters_table(results)
    assert [row[0] for row in table.rows[::2]] == ["all (2)", "chats (1)", "edits (1)"]
    assert table.rows[5][table.columns.index("score")] == "F1 100.0 %"
    assert "category" in to_csv(results).splitlines()[0]
    assert json.loads(to_json("drafters", {}, results))["results"][3]["category"] == "chats"


def test_a_question_that_does_not_fit_is_refused_before_anything_is_measured(
    tiny_model: Path,
) -> None:
    options = {"context": ContextOptions(n_ctx=256, n_threads=1), "trust": True}
    bench = DrafterBench(
        tiny_model,
        ("prompt-lookup",),
        (Question("chats", ("abc", "d")),),
        (SamplingParams(temperature=0.0),),
        max_tokens=200,
        options=options,
    )
    with pytest.raises(OptionError, match=r"question 1 \(chats\) may need 4\d\d tokens"):
        measure_drafters(bench)
