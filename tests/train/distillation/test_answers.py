"""Where new answers begin, what they leave of a text, and that the target is asked once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specrun.train.data.corpus import TokenBatch, TokenCorpus
from specrun.train.data.tokens import TokenSequence
from specrun.train.distillation import answers as target_answers
from specrun.train.distillation.answers import (
    SampledAnswers,
    answer_anew,
    answered_by_target,
    first_to_answer,
    texts_of,
    with_room_for_answers,
)
from specrun.train.target.sampling import end_tokens, uniform_numbers

SETTINGS = SampledAnswers(
    temperature=1.0, n_longest=10, max_length=64, end_ids=(0,), vocab_size=300
)


def marks(text):
    """Marks from a picture: `a` is an answer's token."""
    return [letter == "a" for letter in text]


@pytest.mark.parametrize(
    ("picture", "starts"),
    [
        ("...aaa", {3}),
        ("..aa..aaa", {2, 6}),
        ("..aa..aaa..", {2, 6}),
        ("aaaaaaaa", {1, 2, 3, 4}),
        ("aaa...", {1}),
        ("a", {1}),
        ("....", {4}),
    ],
)
def test_answers_begin_where_one_began(picture, starts):
    found = {
        first_to_answer(marks(picture), uniform)
        for uniform in np.linspace(0.0, 1.0, 200, endpoint=False)
    }
    assert found == starts


@pytest.mark.parametrize(
    "picture", ["...aaa", "..aa..aaa", "..aa..aaa..", "aaaaaaaa", "aaa...", "a", "....", "." * 64]
)
@pytest.mark.parametrize("max_length", [8, 64])
def test_batches_are_planned_for_the_longest_text_that_can_come(draft, picture, max_length):
    """No answer ends early here, and every place at which one may begin is drawn."""
    picture = picture[:max_length]
    settings = replace(SETTINGS, n_longest=5, max_length=max_length, end_ids=())
    text = TokenSequence(np.arange(5, 5 + len(picture), dtype=np.int32), np.array(marks(picture)))
    corpus = TokenCorpus((text,), (0,), (), False)
    uniforms = torch.linspace(0.0, 1.0 - 2**-53, 12, dtype=torch.float64)[:, None].repeat(1, 6)
    longest = max(len(found) for found in answer_anew(draft, [text] * 12, uniforms, settings))
    assert with_room_for_answers(corpus, settings, 1.0).widths == (longest,)
    assert with_room_for_answers(corpus, settings, 0.5).widths == (max(longest, len(text)),)
    assert with_room_for_answers(corpus, settings, 0.0) is corpus


def test_a_new_answer_replaces_the_rest_of_the_text(draft):
    text = TokenSequence(np.arange(5, 17, dtype=np.int32), np.array(marks("....aaa..aaa")))
    noise = uniform_numbers([(0, row) for row in range(8)], 1 + SETTINGS.n_longest)
    for found in answer_anew(draft, [text] * 8, noise, SETTINGS):
        start = int(np.argmax(found.learnt))
        assert start in (4, 9)
        assert found.ids[:start].tolist() == text.ids[:start].tolist()
        assert found.learnt[start:].all()
        assert not found.learnt[:start].any()
        assert start < len(found) <= start + SETTINGS.n_longest


def test_texts_stay_within_their_length(draft):
    text = TokenSequence(np.arange(5, 17, dtype=np.int32), np.array(marks("....aaaaaaaa")))
    noise = uniform_numbers([(0, 0)], 1 + SETTINGS.n_longest)
    (found,) = answer_anew(draft, [text], noise, replace(SETTINGS, max_length=8, end_ids=()))
    assert len(found) == 8
    full = TokenSequence(text.ids[:8], np.zeros(8, np.bool_))
    (kept,) = answer_anew(draft, [full], noise, replace(SETTINGS, max_length=8))
    assert kept.ids.tolist() == full.ids.tolist()


def test_batches_come_back_as_they_were(batch):
    again = TokenBatch.of(batch.numbers, texts_of(batch))
    assert again.numbers == batch.numbers
    for name in ("ids", "learnt", "valid"):
        assert torch.equal(getattr(again, name), getattr(batch, name))


def test_tokens_that_end_answers_are_those_of_the_configuration(target):
    assert end_tokens(target) == {0}
    assert end_tokens(target, 7, None) == {0, 7}


def answered(corpus, target, folder, **changes):
    options = {
        "settings": SETTINGS,
        "seed": 0,
        "tokens_per_batch": 100,
        "identity": "this one",
        **changes,
    }
    return answered_by_target(corpus, target, corpus.training, store=folder, **options)


def test_the_target_is_asked_once(corpus, target, tmp_path, monkeypatch):
    told = []
    first = answered(
        corpus, target, tmp_path, progress=lambda done, total: told.append((done, total))
    )
    n_training = len(corpus.training)
    assert told[-1] == (n_training, n_training)
    assert len(told) > 1
    changed = [
        n
        for n, (sequence, other) in enumerate(zip(first.sequences, corpus.sequences, strict=True))
        if sequence is other
    ]
    assert tuple(changed) == corpus.held_out

    def fails(*_arguments):
        raise AssertionError("the target was asked again")

    monkeypatch.setattr(target_answers, "answer_anew", fails)
    assert answered(corpus, target, tmp_path).digest == first.digest
    for change in (
        {"seed": 1},
        {"identity": "another"},
        {"settings": replace(SETTINGS, temperature=0.5)},
    ):
        with pytest.raises(AssertionError):
            answered(corpus, target, tmp_path, **change)


def test_an_interrupted_run_goes_on_where_it_stopped(corpus, target, tmp_path):
    def stops(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(corpus, target, tmp_path / "one", progress=stops)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "one").iterdir()}
    assert len(kept) == 1
    whole = answered(corpus, target, tmp_path / "two")
    assert answered(corpus, target, tmp_path / "one").digest == whole.digest
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_a_damaged_answer_file_is_made_again(corpus, target, tmp_path):
    whole = answered(corpus, target, tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("[[1")
    assert answered(corpus, target, tmp_path).digest == whole.digest
