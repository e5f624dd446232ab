"""The script that trains what drafts for the embedded target, on a tiny family in its place."""

import dataclasses
import json
import logging

import pytest
from support.tiny_family import ANSWERS, make_family, question

from family import heads as demo_heads
from family.conversations import turn
from family.demo_card import Question
from family.heads import KINDS, learnt_entries, make_heads, parse_plan
from specrun.bench.drafters.corpus import Entry
from specrun.bindings.errors import OptionError
from specrun.convert import convert_checkpoint
from specrun.train.heads import EagleRecipe, MedusaRecipe

ENTRIES = [Entry(name, "function", None, answers[0]) for name, answers in ANSWERS.items()]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """A folder with the tiny family's files by the embedded ones' names."""
    folder = tmp_path_factory.mktemp("embedded")
    family = make_family(folder)
    convert_checkpoint(family.target, folder / "target.gguf", outtype="q8_0")
    convert_checkpoint(family.draft, folder / "drafter.gguf", outtype="q8_0")
    asked = [
        {"question": question(name), "answer": answers[0]} for name, answers in ANSWERS.items()
    ]
    (folder / "questions.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in asked)
    )
    return folder


@pytest.fixture
def tiny(embedded, monkeypatch):
    monkeypatch.setattr(demo_heads, "demo_target", lambda: embedded / "target.gguf")
    monkeypatch.setattr(demo_heads, "demo_drafters", lambda: {"draft": embedded / "drafter.gguf"})
    monkeypatch.setattr(demo_heads, "demo_questions", lambda: embedded / "questions.jsonl")
    monkeypatch.setattr(demo_heads, "build_corpus", lambda: ENTRIES)
    turns = [
        turn(question(name), answer) for name, answers in ANSWERS.items() for answer in answers
    ]
    monkeypatch.setattr(demo_heads, "epoch_conversations", lambda entries, rng: turns)
    monkeypatch.setattr(demo_heads, "TOKENS_PER_BATCH", 400)
    monkeypatch.setattr(
        demo_heads, "RATES", {"medusa": 2e-2, "eagle": 5e-3, "drafter": 1e-2, "pass": 2e-2}
    )
    recipes = {"medusa": MedusaRecipe(heads=2, own_output=False), "eagle": EagleRecipe()}
    monkeypatch.setattr(demo_heads, "RECIPES", recipes)


def plan_for(work, *more):
    arguments = ["--work", str(work), "--device", "cpu", "--precision", "float32", "--threads", "1"]
    return parse_plan([*arguments, "--epochs", "10", "--phrasings", "2", *more])


def test_every_stage_runs_once_and_the_files_are_published(tiny, tmp_path, caplog):
    published = tmp_path / "published"
    published.mkdir()
    kinds = [part for kind in ("medusa", "eagle", "pass", "drafter") for part in ("--only", kind)]
    plan = plan_for(tmp_path / "work", "--publish", str(published), *kinds)
    lengths = make_heads(plan)
    assert set(lengths) == {"medusa", "eagle", "pass", "drafter", "embedded drafter"}
    assert lengths["drafter"] > lengths["embedded drafter"] + 0.3
    assert lengths["medusa"] > 1.2
    assert sorted(path.name for path in published.iterdir()) == [
        "drafter.gguf",
        "eagle.gguf",
        "medusa.gguf",
        "pass.gguf",
    ]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*.gguf")}
    with caplog.at_level(logging.INFO):
        assert make_heads(plan) == lengths
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert "loss" not in caplog.text


def test_an_interrupted_kind_goes_on_where_it_stood(tiny, tmp_path, monkeypatch):
    plan = plan_for(tmp_path / "work", "--only", "medusa")

    def stops(self, status):
        if status.step == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo_heads.LoggedRun, "status", stops)
    with pytest.raises(KeyboardInterrupt):
        make_heads(plan)
    seen = []
    monkeypatch.setattr(
        demo_heads.LoggedRun, "status", lambda self, status: seen.append(status.step)
    )
    make_heads(plan)
    assert seen[0] == 6


def test_too_large_a_family_is_not_published(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_heads, "MOST_BYTES", 1000)
    plan = dataclasses.replace(
        plan_for(tmp_path / "work", "--only", "medusa"), epochs=1, publish=tmp_path
    )
    with pytest.raises(OptionError, match=r"would weigh .* MB, and 0 MB are allowed"):
        make_heads(plan)
    assert not (tmp_path / "medusa.gguf").exists()


def test_what_is_held_out_is_not_learnt():
    held_out = [Question("What does first do?", ANSWERS["first"][0])]
    assert [entry.name for entry in learnt_entries(ENTRIES, held_out)] == [
        "second",
        "third",
        "fourth",
    ]
    assert learnt_entries(ENTRIES, []) == ENTRIES


def test_all_kinds_are_trained_where_none_is_named():
    assert parse_plan([]).kinds == KINDS == ("medusa", "eagle", "eagle3", "pass", "drafter")
    assert parse_plan(["--only", "eagle", "--only", "eagle"]).kinds == ("eagle",)


def test_unknown_kinds_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_plan(["--only", "abacus"])
    assert stopped.value.code == 2
    assert "abacus" in capsys.readouterr().err
