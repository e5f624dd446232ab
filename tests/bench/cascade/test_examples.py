"""Examples and scores of `specrun bench cascade`."""

from __future__ import annotations

import sys

import pytest

from specrun.bench.cascade.examples import check_packages, demo_examples, quality_of, read_examples
from specrun.bindings.errors import (
    FileMissingError,
    MissingPackageError,
    ModelError,
    OptionError,
)


def test_the_demos_questions_have_docstrings_for_answers():
    examples = demo_examples(7)
    assert len({example.prompt for example in examples}) == 7
    assert all(example.is_answer and example.reference for example in examples)


def test_lines_of_questions_and_answers(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(
        '{"question": "who?", "answer": "a"}\n\n{"prompt": "why?", "reference": "b"}\n',
        encoding="utf-8",
    )
    pairs = [(one.prompt, one.reference) for one in read_examples(path, 9)]
    assert pairs == [("who?", "a"), ("why?", "b")]


def test_text_is_cut_into_pieces_that_together_are_the_text(tmp_path):
    path = tmp_path / "t.txt"
    text = "".join(f"line {number} of a text that goes on\n" for number in range(200))
    path.write_text(text, encoding="utf-8")
    examples = read_examples(path, 100)
    assert "".join(one.prompt + one.reference for one in examples) == text
    assert not any(one.is_answer for one in examples)
    for one in examples:
        assert one.reference.startswith(" ")
        assert 0.2 < len(one.prompt) / len(one.prompt + one.reference) < 0.35
    assert len(read_examples(path, 3)) == 3


@pytest.mark.parametrize(
    ("name", "content", "error", "problem"),
    [
        ("t.txt", b"short", OptionError, "is too short"),
        ("t.txt", b"\xff\xfe\xff", ModelError, "is not UTF-8 text"),
        ("q.jsonl", b"{", ModelError, "line 1 is not JSON"),
        ("q.jsonl", b'{"question": "who?"}', ModelError, 'no "question" and "answer"'),
        ("q.jsonl", b"[1]", ModelError, 'no "question" and "answer"'),
        ("none.txt", None, FileMissingError, "cannot be read"),
    ],
)
def test_files_without_examples_are_refused(tmp_path, name, content, error, problem):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=problem):
        read_examples(path, 3)


def test_scores_of_known_answers():
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    reference = "Return the name of the current working directory."
    same = quality_of([reference + "\n"], [reference])
    assert (same.exact_match, same.rouge_2) == (1.0, 1.0)
    assert same.bleu == pytest.approx(100.0)
    other = quality_of(["Nothing alike whatsoever", reference], [reference, reference])
    assert (other.exact_match, other.rouge_2) == (0.5, 0.5)
    # Seven pairs of words in the reference, three in the answer, all found: F1 is 0.6.
    part = quality_of(["Return the name of"], [reference])
    assert part.rouge_2 == pytest.approx(0.6)
    assert 0.0 < part.bleu < other.bleu < 100.0


def test_a_missing_library_is_named_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(MissingPackageError, match="rouge-score"):
        check_packages()
