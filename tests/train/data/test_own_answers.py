"""Self-distillation: the target's own answers, asked once, and heads that learn them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from support.tiny_targets import ANSWERS
from support.training import head_run

from specrun.bindings.errors import MalformedFileError, ModelError
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime import Engine
from specrun.train.data import Answered, AnswerSettings, answers
from specrun.train.data.answers import FileAnswerer, answer_prompts
from specrun.train.data.documents import Document, PlainText, read_documents
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.heads import MedusaRecipe
from specrun.train.trainer import train

pytestmark = pytest.mark.long

PROMPTS: list[Document] = [Answered(question, None) for question in ANSWERS]


@pytest.fixture(scope="module")
def tokenizer(taught) -> TargetTokenizer:
    return TargetTokenizer(taught.folder)


def asked(
    taught, tokenizer, store, documents=PROMPTS, *, weights="first", target=None, progress=None,
    **settings,
):  # fmt: skip
    return answer_prompts(
        target or nullcontext(FileAnswerer(taught.gguf)),
        *(tokenizer, documents, store, AnswerSettings(**settings)),
        **{"identity": {"weights": weights}, "max_length": 256, "n_threads": 1},
        progress=progress,
    )


@pytest.fixture
def calls(monkeypatch) -> list[Sequence[int]]:
    """The prompts that the target is asked."""
    found: list[Sequence[int]] = []
    submit = Engine.submit

    def counted(engine, prompt, *rest, **options):
        found.append(prompt)
        return submit(engine, prompt, *rest, **options)

    monkeypatch.setattr(answers.Engine, "submit", counted)
    return found


def test_the_target_answers_and_only_its_tokens_are_learnt(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    found = asked(taught, tokenizer, tmp_path / "a.jsonl")
    for item, (question, answer) in zip(found, ANSWERS.items(), strict=True):
        assert tokenizer.text(item.ids[item.learnt].tolist()) == f"{answer}<|end|>"
        assert (
            tokenizer.text(item.ids[~item.learnt].tolist())
            == f"<|user|>{question}<|end|><|assistant|>"
        )
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [record["text"] for record in records] == list(ANSWERS.values())


def test_an_interrupted_run_asks_only_what_is_left(
    taught, tokenizer: TargetTokenizer, tmp_path: Path, calls
) -> None:
    store = tmp_path / "a.jsonl"
    whole = asked(taught, tokenizer, store, temperature=1.0)
    lines = store.read_text().splitlines(keepends=True)
    store.write_text("".join(lines[:4]) + lines[4][:20])  # killed within the fifth line
    calls.clear()
    again = asked(taught, tokenizer, store, temperature=1.0)
    assert len(calls) == 2
    assert all(
        np.array_equal(first.ids, other.ids) for first, other in zip(whole, again, strict=True)
    )
    asked(taught, tokenizer, store, temperature=0.5)
    assert len(calls) == 2 + len(PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_several_at_once_are_answered_as_in_turn(
    taught, tokenizer: TargetTokenizer, tmp_path: Path, temperature: float
) -> None:
    in_turn = asked(taught, tokenizer, tmp_path / "a.jsonl", temperature=temperature, parallel=1)
    together = asked(taught, tokenizer, tmp_path / "b.jsonl", temperature=temperature, parallel=4)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    assert [each.ids.tolist() for each in together] == [each.ids.tolist() for each in in_turn]


def test_ctrl_c_keeps_the_answers_that_are_there(
    taught, tokenizer: TargetTokenizer, tmp_path: Path, calls
) -> None:
    """Those under way are stopped: what was told is stored, and only the others are asked again."""
    store = tmp_path / "a.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(taught, tokenizer, store, progress=stop)
    assert len(store.read_text().splitlines()) == 2
    calls.clear()
    found = asked(taught, tokenizer, store)
    assert len(calls) == len(PROMPTS) - 2
    whole = asked(taught, tokenizer, tmp_path / "b.jsonl", parallel=1)
    assert [item.ids.tolist() for item in found] == [item.ids.tolist() for item in whole]


def test_a_prompt_that_is_asked_twice_has_two_answers_which_stay(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    """At temperature 3 a tiny target says 40 tokens or so at random: two answers are never the
    same."""
    store, twice = tmp_path / "a.jsonl", [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    whole = asked(taught, tokenizer, store, twice, temperature=3.0)
    assert not np.array_equal(whole[0].ids, whole[2].ids)
    for kept in range(4):
        store.write_text("".join(store.read_text().splitlines(keepends=True)[:kept]))
        again = asked(taught, tokenizer, store, twice, temperature=3.0)
        assert [sequence.ids.tolist() for sequence in again] == [
            sequence.ids.tolist() for sequence in whole
        ]


def test_other_weights_answer_anew(
    taught, tokenizer: TargetTokenizer, tmp_path: Path, calls
) -> None:
    for weights, expected in (("first", 6), ("first", 6), ("second", 12)):
        asked(taught, tokenizer, tmp_path / "a.jsonl", weights=weights)
        assert len(calls) == expected


def test_a_target_that_has_answered_everything_is_not_needed(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    @contextmanager
    def gone():
        pytest.fail("the target was opened")
        yield taught.gguf

    whole = asked(taught, tokenizer, tmp_path / "a.jsonl")
    again = asked(taught, tokenizer, tmp_path / "a.jsonl", target=gone())
    assert all(
        np.array_equal(first.ids, other.ids) for first, other in zip(whole, again, strict=True)
    )


def test_a_target_that_was_trained_on_in_its_place_answers_anew(
    taught, tmp_path: Path, monkeypatch
) -> None:
    """A run names the weights by their files; a second one converts nothing but where they
    changed."""
    folder, data = tmp_path / "target", tmp_path / "prompts.jsonl"
    shutil.copytree(taught.folder, folder)
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in ANSWERS))
    places = {"target": folder, "data": (data,), "own_answers": AnswerSettings(longest=4)}
    run = head_run(taught, tmp_path / "out", force=True, **places)
    converted = []
    convert = answers.convert_checkpoint

    def counted(*given, **options):
        converted.append(given)
        convert(*given, **options)

    monkeypatch.setattr(answers, "convert_checkpoint", counted)
    digests = []
    for number in range(3):
        if number == 2:
            os.utime(folder / "model.safetensors", ns=(1, 1))
        digests.append(MedusaRecipe().training(run, None).texts().digest)
        assert len(converted) == (1, 1, 2)[number]
    assert len(set(digests)) == 1


def test_what_asks_nothing_is_left_out(taught, tokenizer: TargetTokenizer, tmp_path: Path) -> None:
    documents = [PlainText("x y z"), PROMPTS[0], Answered("long " * 300, None)]
    found = asked(taught, tokenizer, tmp_path / "a.jsonl", documents)
    assert len(found) == 1
    with pytest.raises(ModelError, match=r"has no prompts for \S+:"):
        asked(taught, tokenizer, tmp_path / "b.jsonl", [PlainText("x y z")])
    for line in ('{"key": 3}', "[" * 50_000, '{"key": "a", "answer": [Infinity]}', "[]"):
        (tmp_path / "c.jsonl").write_text(line + "\n")
        with pytest.raises(MalformedFileError, match=r"line 1 of .*c\.jsonl is no answer"):
            asked(taught, tokenizer, tmp_path / "c.jsonl")


def test_heads_distilled_from_prompts_alone_draft(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    """Without one given answer: prompts, the target's own texts, and its law."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in ANSWERS))
    settings = {"steps": 80, "max_length": 256, "learning_rate": 1e-2}
    own = {"data": (data,), "own_answers": AnswerSettings()}
    run = head_run(taught, tmp_path / "heads", **settings, **own)
    report = train(MedusaRecipe(heads=2, from_law=True), run)
    assert report.result.curves.measures[-1][1]["head 2 top-1"] > 0.75
    assert sorted(path.name for path in (tmp_path / "heads" / "training").iterdir()) == [
        "answers.jsonl",
        "state.pt",
    ]
    convert_head(report.output, tmp_path / "h.gguf", target=taught.gguf)
    assert len(read_documents([data], need_answers=False)) == len(ANSWERS)
