"""Inputs for measuring retrieval: workloads, documentation; the literature's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from support.commands import results_of, run

from specrun.bench.drafters.corpus import Entry, documentation_store, store_description
from specrun.bench.drafters.prompts import Conversation, demo_workload
from specrun.bench.report import literature_note
from specrun.bindings.models import Model
from specrun.runtime.demo import demo_questions
from specrun.runtime.drafters.retrieval import open_store

QUESTIONS = [json.loads(line) for line in demo_questions().read_text(encoding="utf-8").splitlines()]
ANSWERS = {question["question"]: question["answer"] for question in QUESTIONS}


def bench(*arguments: str | Path) -> Result:
    return run("bench", *arguments)


def count_words(conversation: Conversation) -> int:
    return sum(len(message["content"].split()) for message in conversation)


def test_plain_questions_have_nothing_before_them() -> None:
    chats = demo_workload("questions", 5, 0, count_words)
    assert all(len(chat) == 1 and chat[0]["content"] in ANSWERS for chat in chats)
    assert len({chat[0]["content"] for chat in chats}) == 5


@pytest.mark.parametrize("context", [0, 100, 700])
def test_repeated_questions_were_answered_before(context: int) -> None:
    for chat in demo_workload("repeated", 4, context, count_words):
        question = chat[-1]["content"]
        assert [message["content"] for message in chat[:2]] == [question, ANSWERS[question]]
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2) + [
            "user"
        ]
        # Once before, however long the conversation.
        assert sum(message["content"] == question for message in chat) == 2
        assert context <= count_words(chat) < max(context, 60) + 60


def test_edited_answers_differ_a_little_from_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sentence = "Return the lowest index in {} where the subsection sub is found, and -1 on failure."
    entries = [
        Entry(f"{kind}.find", "method", None, sentence.format(kind)) for kind in ("bytes", "str")
    ]
    entries += [
        Entry("a.find", "method", None, "Search."),
        Entry("os.find", "method", None, "Walk the whole tree."),
    ]
    monkeypatch.setattr("specrun.bench.drafters.corpus.build_corpus", lambda: entries)
    chats = demo_workload("edited", 3, 0, count_words)
    assert len(chats) == 1
    for chat in chats:
        assert chat[0]["content"] != chat[-1]["content"]
        assert chat[0]["content"].rpartition(".")[2] == chat[-1]["content"].rpartition(".")[2]
        assert len(chat[1]["content"]) > 30


def test_quoted_texts_stand_in_the_question() -> None:
    for chat in demo_workload("quoted", 3, 0, count_words):
        assert chat[-1]["content"].removeprefix("Repeat: ") in ANSWERS.values()


def test_what_the_literature_says_stands_beside() -> None:
    note = literature_note(["none", "ensemble(draft(a.gguf), prompt-lookup)", "rest(x.store)"])
    assert note is not None
    assert "prompt lookup 1.73" in note
    assert "REST 1.63" in note
    assert literature_note(["none"]) is None


@pytest.fixture
def small_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing takes seconds to read."""
    known = [("f", QUESTIONS[0]["answer"]), ("g", "Something else that is documented here.")]
    monkeypatch.setattr("specrun.bench.drafters.corpus._of_files", lambda: iter(known))
    monkeypatch.setattr(
        "specrun.bench.drafters.corpus.native_entries",
        lambda: iter([("h", "class", None, None)]),
    )


@pytest.mark.usefixtures("small_documentation")
def test_a_disjoint_store_holds_no_answer(tiny_model: Path) -> None:
    with Model(tiny_model, vocab_only=True) as model:
        query = model.vocabulary.tokenize(QUESTIONS[0]["answer"][:12], add_special=False)
        for kind, holds in (("all", True), ("disjoint", False)):
            with documentation_store(tiny_model, kind) as path:
                found = open_store(path, model.vocabulary).nearest(query, 1, 5, len(query))
                assert bool(found) is holds
            assert not path.exists()
    assert "holds the answers" in store_description("all")
    assert "disjoint" in store_description("disjoint")


@pytest.mark.usefixtures("small_documentation")
def test_a_bench_of_retrieval_says_what_was_asked_and_retrieved(tiny_model: Path) -> None:
    quick = "-n 8 -r 1 -t 1 -c 1024 --questions 1 --json"
    asked = "--workload repeated --context 300 --drafter rest --docs-store all"
    results = results_of(run(f"bench drafters {quick} {asked} -m", tiny_model))
    assert [result["drafter"] for result in results] == ["none", "rest(all.store)"]
    assert "workload repeated" in results[0]["workload"]
    assert "the store holds the answers" in results[0]["workload"]
    assert 300 <= results[0]["prompt_tokens"] < 600
    assert results[1]["text"]["n_same"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "repeated", "--context", "4000"], "trained for 1,024"),
        (["--workload", "repeated", "-p", "x"], "leave out -p"),
        (["--context", "50", "-p", "x"], "leave out -p"),
        (["--workload", "nothing"], "nothing"),
    ],
)
def test_workloads_that_cannot_be_made(
    tiny_model: Path, arguments: list[str], message: str
) -> None:
    done = bench("drafters", "-m", tiny_model, *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
