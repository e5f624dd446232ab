"""The script that makes the demo family, from a small corpus to scored GGUF files."""

import json
import logging
import shutil
from dataclasses import replace

import pytest

from family import models as demo_family
from family.demo_card import ModelFacts, Scores, draw_questions, model_card
from family.llama import Llama
from family.models import SHIPPED, make_family, parse_plan
from specrun.bench.drafters import corpus
from specrun.bench.drafters.corpus import Entry
from specrun.train.target.shape import ModelShape

SMALL = ModelShape(
    vocab_size=1024, hidden=256, n_layers=1, feed_forward=256, n_heads=4, n_kv_heads=4
)
SCORES = Scores(
    exact=0.95,
    n_questions=200,
    same_text=1.0,
    mean_accepted_length=4.321,
    acceptance_rate=0.8,
    n_speculative=50,
    wrong=(),
)


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """Some entries of one module: reading the whole library takes seconds."""
    library = tmp_path_factory.mktemp("library")
    shutil.copy(shutil.__file__, library)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(corpus.sysconfig, "get_path", lambda _name: str(library))
        return [entry for entry in corpus.build_corpus() if entry.name.startswith("shutil.c")]


def test_every_stage_runs_once_and_the_files_are_published(entries, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(demo_family, "build_corpus", lambda: entries)
    monkeypatch.setattr(demo_family, "TARGET_SHAPE", SMALL)
    monkeypatch.setattr(demo_family, "DRAFTER_SHAPE", SMALL)
    few = replace(demo_family.SETTINGS, tokens_per_batch=1024, warmup_steps=4)
    monkeypatch.setattr(demo_family, "SETTINGS", few)
    published = tmp_path / "published"
    published.mkdir()
    folders = ["--work", str(tmp_path / "work"), "--publish", str(published)]
    steps = ["--target-steps", "16", "--drafter-steps", "12"]
    plan = parse_plan([*folders, *steps, "--device", "cpu", "--threads", "1"])
    scores = make_family(plan)
    assert scores.n_questions == len(entries)
    assert scores.exact > 0.5
    assert scores.mean_accepted_length > 1.5
    assert sorted(path.name for path in published.iterdir()) == sorted(SHIPPED)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").glob("*.gguf")}
    with caplog.at_level(logging.INFO):
        assert make_family(plan) == scores
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert "loss" not in caplog.text
    lines = (published / "questions.jsonl").read_text().splitlines()
    assert {entry.sentence for entry in entries} == {json.loads(line)["answer"] for line in lines}


def test_a_model_that_was_interrupted_goes_on(entries, tmp_path, monkeypatch, caplog):
    plan = parse_plan(["--work", str(tmp_path), "--device", "cpu", "--threads", "1"])
    tokenizer = demo_family.tokenizer_stage(plan, entries)

    def stop(status):
        if status.step == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(demo_family, "report", stop)
        with pytest.raises(KeyboardInterrupt):
            demo_family.model_stage(plan, "target", SMALL, 8, entries, tokenizer)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["target.pt"]
    with caplog.at_level(logging.INFO):
        demo_family.model_stage(plan, "target", SMALL, 8, entries, tokenizer)
    assert "continuing from step 5" in caplog.text
    assert json.loads((tmp_path / "target.json").read_text())["step"] == 8
    assert (tmp_path / "target" / "model.safetensors").is_file()


def test_parameters_are_counted_as_torch_counts_them():
    facts = ModelFacts("small", SMALL, 1, 1, 1.0, 1)
    assert facts.n_parameters == sum(parameter.numel() for parameter in Llama(SMALL).parameters())


def test_the_card_states_what_was_measured():
    entries = [Entry("a", "class", None, "An entry."), Entry("a.b", "method", None, "A method.")]
    facts = ModelFacts("target", SMALL, 4500, 13_000_000, 1800.0, 7_900_000)
    card = model_card(
        entries,
        [facts],
        SCORES,
        precision="float32",
        device="cpu",
        threads=2,
        notes="Stopped twice.",
    )
    for stated in (
        "95.0% of 200",
        "4.32 over 50",
        "80.0%",
        "7.9 MB",
        "1 classes, 1 methods",
        "30 min",
        "Stopped twice.",
    ):
        assert stated in card
    assert max(len(line) for line in card.splitlines()) < 130


def test_questions_are_the_same_every_time():
    entries = [Entry(f"m.f{i}", "function", None, f"Do {i}.") for i in range(300)]
    questions = draw_questions(entries)
    assert len(questions) == 200
    assert questions == draw_questions(entries)
    assert all(item.question.startswith("What does m.f") for item in questions)


def test_unknown_devices_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_plan(["--device", "abacus"])
    assert stopped.value.code == 2
    assert "abacus" in capsys.readouterr().err
