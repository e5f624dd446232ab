"""Prompts that a target writes itself: what it is asked, what is kept, what is known already."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from support.tiny_targets import ANSWERS
from support.training import head_run

from specrun.bindings.errors import ModelError, OptionError, TemplateError
from specrun.runtime import Engine
from specrun.runtime.chat import ChatTemplate
from specrun.train.data import AnswerSettings, answers, own_prompts
from specrun.train.data.answers import FileAnswerer
from specrun.train.data.tokens import FileTokens, TargetTokenizer
from specrun.train.heads import EagleRecipe, HeadRun
from specrun.train.trainer import train

WEIGHTS = {"weights": "these"}


@pytest.fixture(scope="module")
def tokenizer(taught) -> TargetTokenizer:
    return TargetTokenizer(taught.folder)


@contextmanager
def nobody():
    raise AssertionError("the target is asked again")
    yield


def rewritten(store: Path, said: list[tuple[str, bool]]) -> None:
    """Put other texts into a store, of texts that ended or did not."""
    records = [json.loads(line) for line in store.read_text().splitlines()]
    changed = [
        {**record, "text": text, "whole": whole}
        for record, (text, whole) in zip(records, said, strict=True)
    ]
    store.write_text("".join(json.dumps(record) + "\n" for record in changed))


def asked(taught, tokenizer, store: Path, count: int) -> None:
    """Fill a store, whatever a model that has only learnt to answer says."""
    with suppress(ModelError):
        own_prompts(
            nullcontext(FileAnswerer(taught.gguf)), tokenizer, count, store, identity=WEIGHTS
        )


def test_the_opening_is_all_that_stands_before_a_users_message(
    taught, tokenizer: TargetTokenizer
) -> None:
    assert tokenizer.text(tokenizer.opening()) == "<|user|>"
    assert FileTokens(taught.gguf).opening() == tokenizer.opening()


def test_a_template_that_shows_no_message_is_refused(taught) -> None:
    tokens = TargetTokenizer(taught.folder)
    tokens.template = ChatTemplate("<|user|>", bos="", eos="")
    with pytest.raises(TemplateError, match="leaves out the user's last message"):
        tokens.opening()
    tokens.template = None
    with pytest.raises(TemplateError, match="no chat template"):
        tokens.opening()


def test_it_goes_on_from_the_opening_with_chance_of_its_own(
    taught, tokenizer: TargetTokenizer, tmp_path: Path, monkeypatch
) -> None:
    found = []
    submit = Engine.submit

    def counted(engine, prompt, params, **options):
        found.append((list(prompt), params.temperature, options["index"]))
        return submit(engine, prompt, params, **options)

    monkeypatch.setattr(answers.Engine, "submit", counted)
    asked(taught, tokenizer, tmp_path / "p.jsonl", 6)
    assert found == [(tokenizer.opening(), 1.0, number) for number in range(6)]
    texts = [json.loads(line)["text"] for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert len(set(texts)) > 1


def test_whole_prompts_are_kept_once_in_their_order_and_a_few_are_the_first(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    store = tmp_path / "p.jsonl"
    asked(taught, tokenizer, store, 6)
    said = [
        (" How is bread made? ", True),
        ("It never came to an end and", False),
        ("Hi there", True),
        ("Who wrote this book?", True),
        ("How is bread made?", True),
        ("Where is the river?", True),
    ]
    rewritten(store, said)
    kept = own_prompts(nobody(), tokenizer, 6, store, identity=WEIGHTS)
    wanted = ["How is bread made?", "Who wrote this book?", "Where is the river?"]
    assert [prompt.prompt for prompt in kept] == wanted
    fewer = own_prompts(nobody(), tokenizer, 4, store, identity=WEIGHTS)
    assert fewer == kept[:2]
    with pytest.raises(AssertionError, match="asked again"):  # other weights wrote none of them
        own_prompts(nobody(), tokenizer, 4, store, identity={"weights": "others"})


def test_a_target_that_writes_nothing_of_use_is_told(
    taught, tokenizer: TargetTokenizer, tmp_path: Path
) -> None:
    store = tmp_path / "p.jsonl"
    asked(taught, tokenizer, store, 2)
    rewritten(store, [("No", True), ("On and on it", False)])
    with pytest.raises(ModelError, match="writes no prompts of its own: give some"):
        own_prompts(nobody(), tokenizer, 2, store, identity=WEIGHTS)


def run_of(taught, output: Path, prompts: Path, **changes) -> HeadRun:
    own = {"target": taught.gguf, "data": (), "own_answers": AnswerSettings(longest=16)}
    settings = {"prompts": prompts, "steps": 1, "max_length": 128, "held_out": 0.05, **changes}
    return head_run(taught, output, **own, **settings)


def test_a_run_learns_from_answers_to_both_and_says_so(taught, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(ANSWERS) + "\n")
    output = tmp_path / "head"
    train(EagleRecipe(), run_of(taught, output, prompts))  # of the file's prompts alone
    alone = len((output / "training" / "answers.jsonl").read_text().splitlines())
    store = tmp_path / "both" / "training" / "prompts.jsonl"
    store.parent.mkdir(parents=True)
    both = run_of(taught, tmp_path / "both", prompts, n_own_prompts=12, force=True)
    report = train(EagleRecipe(), both)
    written = [json.loads(line) for line in store.read_text().splitlines()]
    usable = {
        record["text"].strip()
        for record in written
        if record["whole"] and len(record["text"].split()) >= 3
    }
    assert len(written) == 12
    assert usable  # else nothing is tried here
    assert report.n_sequences + report.n_held_out == alone + len(usable)
    card = (tmp_path / "both" / "README.md").read_text()
    assert "prompts that the target wrote in 12 tries" in card


def test_prompts_of_its_own_need_a_target_that_answers(taught, tmp_path: Path) -> None:
    given = {"data": (taught.data,), "prompts": None, "own_answers": None}
    with pytest.raises(OptionError, match="prompts of the target's own"):
        HeadRun(target=taught.gguf, output=tmp_path, n_own_prompts=1, **given)
