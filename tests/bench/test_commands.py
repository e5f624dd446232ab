"""`specrun bench` end to end on tiny random models; times are never asserted."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from support.commands import results_of, run


def bench(*arguments: str | Path) -> Result:
    return run("bench", *arguments)


def results(*arguments: str | Path) -> list[dict[str, Any]]:
    return results_of(bench(*arguments, "--json"))


@pytest.fixture
def drafters(tiny_model: Path, tiny_flat_twin: Path) -> list[str]:
    """A small comparison."""
    quick = "drafters -n 12 -r 2 -t 1 -c 256 -fa off -ctk f32 -ctv f32"
    return [*quick.split(), "-m", str(tiny_model), "-md", str(tiny_flat_twin)]


def good(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def test_drafters_as_json(drafters: list[str]) -> None:
    asked = ("-p", "one", "-p", "two words", "--temp", "0,0.8")
    done = bench(*drafters, *asked, "--spec-draft-n-max", "5", "--json")
    found = results_of(done)
    assert json.loads(done.stdout)["bench"] == "drafters"
    assert [(result["drafter"], result["temperature"]) for result in found] == [
        *(("none", 0.0), ("draft(twin.gguf, n=5)", 0.0), ("prompt-lookup", 0.0)),
        *(("none", 0.8), ("draft(twin.gguf, n=5)", 0.8), ("prompt-lookup", 0.8)),
    ]
    assert found[0]["speed_up"] is None
    assert found[0]["mean_accepted_length"] == 1.0
    assert found[1]["text"] == {"n_prompts": 2, "n_same": 2, "first_difference": None}
    assert found[4]["text"] is None
    assert found[1]["acceptance_rate"] > 0
    assert len(found[1]["acceptance_by_position"]) == 5
    assert found[1]["tokens_per_second"]["n"] == 2
    assert found[1]["speed_up"]["value"] > 0


def test_drafters_in_the_other_forms(drafters: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n", encoding="utf-8")
    common = [*drafters, "--prompts", str(tmp_path / "prompts.txt"), "--spec-draft-n-max", "2,3"]
    markdown = good(bench(*common))
    verdict, text, _, head = markdown.splitlines()[:4]
    assert verdict.startswith("Drafting with ")
    assert "answers" in text
    assert head.startswith("| model ")
    assert "draft(twin.gguf, n=3)" in markdown
    rows = list(csv.DictReader(io.StringIO(good(bench(*common, "-o", "csv")))))
    assert [row["drafter"] for row in rows] == [
        *("none", "draft(twin.gguf, n=2)", "draft(twin.gguf, n=3)", "prompt-lookup")
    ]
    table = good(bench(*common, "-o", "table"))
    assert "model target.gguf" in table
    assert "none (plain)" in table


def test_a_padded_target_says_so_and_answers_the_same(drafters: list[str], tmp_path: Path) -> None:
    pytest.importorskip("specrun.convert.cut.pad")
    picture, kept = tmp_path / "p.png", tmp_path / "padded.gguf"
    asked = ("-p", "one", "--pad-to", "200K", "--drafter", "none")
    padded = bench(*drafters, *asked, "--keep", kept, "--plot", picture)
    assert "Padding scales the target's cost" in good(padded)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert kept.is_file()


def test_chosen_drafters_only(drafters: list[str]) -> None:
    at, lookup = drafters.index("-md"), "prompt-lookup(n=3, min_ngram=1)"
    without_draft = drafters[:at] + drafters[at + 2 :]
    chosen = results(*without_draft, "-p", "one", "--drafter", lookup, "--no-chat-template")
    assert [result["drafter"] for result in chosen] == ["none", lookup]


def test_rules_are_compared_on_the_same_drafts(drafters: list[str]) -> None:
    arguments = ["-p", "one", "--temp", "1", "--spec-draft-n-max", "3", "--drafter", "none"]
    found = results(*drafters, *arguments, "--accept", "exact", "--accept", "token")
    assert [(result["drafter"], result["rule"]) for result in found] == [
        ("none", "exact"),
        ("draft(twin.gguf, n=3)", "exact"),
        ("draft(twin.gguf, n=3)", "token"),
    ]
    assert "draft(twin.gguf, n=3), token" in good(bench(*drafters, *arguments, "--accept", "token"))
    assert bench(*drafters, "-p", "one", "--accept", "tokn").exit_code == 2
    refused = bench(*drafters, "-p", "one", "--accept", "token-cascade")
    assert (refused.exit_code, "bench cascade measures it" in refused.stderr) == (2, True)


def test_planned_drafters_are_those_that_tune_found(
    drafters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked = bench(*drafters, "-p", "one", "--planned")
    assert asked.exit_code == 2
    assert "run specrun tune first" in asked.stderr
    loading = drafters[drafters.index("-t") :]
    tuned = run("tune -n 8 --seconds 0.05 --temp 0 -p one", *loading)
    assert tuned.exit_code == 0, tuned.output
    (pair,) = json.loads(next((tmp_path / "cache").rglob("*.json")).read_text())["plans"]
    (plan,) = pair["plans"]
    found = results(*drafters, "-p", "one", "--drafter", "none", "--planned")
    assert [result["drafter"] for result in found] == [
        "none",
        *(f"draft(twin.gguf, {options})" for options in plan["alternatives"]),
    ]
    assert bench(*drafters, "-p", "one", "--planned", "--pad-to", "200K").exit_code == 2


def test_alpha_is_reported_of_drafters_that_have_a_law(drafters: list[str]) -> None:
    """Of the twin as of the n-gram; plain decoding and prompt lookup draw nothing."""
    asked = (*drafters, "-p", "one", "--temp", "1", "-r", "1", "--drafter", "ngram(n=2)")
    asked += ("--drafter", "prompt-lookup")
    found = {result["drafter"]: result["alpha"] for result in results(*asked, "--alpha")}
    twin = next(name for name in found if name.startswith("draft("))
    assert 0.0 < found[twin] <= 1.0
    assert 0.0 <= found["ngram(n=2)"] < 1.0
    assert found["none"] is found["prompt-lookup"] is None
    table = good(bench(*asked, "--alpha"))
    assert " alpha |" in table
    assert "corollary 3.6" in table
    assert all(result["alpha"] is None for result in results(*asked))
    assert " alpha |" not in good(bench(*asked))


def test_the_demo_asks_its_own_questions(
    tiny_model: Path, tiny_flat_twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        '{"question": "who?", "answer": "a"}\n{"question": "why?", "answer": "b"}\n',
        encoding="utf-8",
    )
    monkeypatch.setattr("specrun.runtime.demo.demo_target", lambda: tiny_model)
    monkeypatch.setattr("specrun.runtime.demo.demo_drafters", lambda: {"draft": tiny_flat_twin})
    monkeypatch.setattr("specrun.bench.drafters.prompts.demo_questions", lambda: questions)
    quick = ("drafters", "--demo", "-n", "8", "-r", "1", "-t", "1", "-c", "256")
    found = results(*quick, "--spec-draft-n-max", "2", "--pad-to", "100K")
    names = [result["drafter"] for result in found]
    assert names == ["none", "draft(twin.gguf, n=2)", "prompt-lookup"]
    assert found[0]["n_prompts"] == 2
    assert found[0]["target"]["padded_parameters"] > 0
    chosen = results(*quick, "--drafter", "draft(n=3)")
    assert [result["drafter"] for result in chosen] == ["none", "draft(twin.gguf, n=3)"]


def test_the_last_newline_of_a_file_is_not_part_of_its_prompt(
    drafters: list[str], tmp_path: Path
) -> None:
    for name, text in (("a", "one"), ("b", "one\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    asked = ("--temp", "1", "-r", "1")
    first, second = (results(*drafters, "-f", tmp_path / name, *asked)[1] for name in "ab")
    assert first["acceptance_by_position"] == second["acceptance_by_position"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["drafters"], 2),
        (["drafters", "--json", "-o", "csv"], 2),
        (["drafters", "--demo", "-m", "MODEL"], 2),
        (["drafters", "-m", "MODEL"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--temp", "-1"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--temp", "nan"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "-n", "0"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--pad-to", "much"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--pad-to", "10"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--keep", "k.gguf"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--plot", "p.txt"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--drafter", "drfat(n=3)"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--drafter", "draft(n=3"], 2),
        (["drafters", "-m", "MODEL", "-p", "x", "--spec-draft-n-max", "3"], 2),
        (["drafters", "-m", "none.gguf", "-p", "x"], 3),
        (["drafters", "-m", "MODEL", "-md", "none.gguf", "-p", "x"], 3),
        (["drafters", "-m", "MODEL", "-f", "none.txt"], 3),
        (["drafters", "-m", "MODEL", "--drafter", "draft('SMALL', vocabulary=same)", "-p", "x"], 4),
        (["nonsense"], 2),
    ],
)
def test_bad_input_ends_with_a_sentence_and_a_code(
    arguments: list[str], code: int, tiny_model: Path, tiny_small_vocab: Path
) -> None:
    names = {"MODEL": str(tiny_model), "SMALL": str(tiny_small_vocab)}
    small = names["SMALL"]
    given = [names.get(argument, argument).replace("SMALL", small) for argument in arguments]
    result = bench(*given)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()[-1]) > 20


@pytest.mark.parametrize("name", ["drafters", "cascade"])
def test_help_has_a_line_for_every_command(name: str) -> None:
    assert name in good(bench("--help"))
    assert "Usage" in good(bench(name, "--help"))
