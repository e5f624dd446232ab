"""Documents to tokens: what is learnt, how texts are cut, what is held out, and in which batches
they come."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrun.bindings.errors import FileMissingError, ModelError, OptionError, TemplateError
from specrun.runtime import Runtime
from specrun.runtime.chat import ChatTemplate
from specrun.train.data import Answered
from specrun.train.data.corpus import corpus_of, encode_corpus, plan_batches
from specrun.train.data.documents import Chat, PlainText, read_documents
from specrun.train.data.tokens import TargetTokenizer, TokenSequence

CHAT = Chat(
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "The first."},
        {"role": "user", "content": "And <|end|>?"},
        {"role": "assistant", "content": "The last."},
    )
)


@pytest.fixture(scope="module")
def tokenizer(taught) -> TargetTokenizer:
    return TargetTokenizer(taught.folder)


def learnt(tokenizer: TargetTokenizer, document: object) -> str:
    found = tokenizer.encode(document)
    return tokenizer.text(found.ids[found.learnt].tolist())


def test_only_the_assistants_tokens_are_learnt_with_what_ends_them(
    tokenizer: TargetTokenizer,
) -> None:
    assert learnt(tokenizer, CHAT) == "The first.<|end|>The last.<|end|>"
    assert learnt(tokenizer, Answered("Who?", "Me.")) == "Me.<|end|>"
    assert learnt(tokenizer, PlainText("All of it.")) == "All of it."


def test_answers_that_the_template_shows_otherwise_are_found(
    tokenizer: TargetTokenizer, monkeypatch
) -> None:
    """As templates that leave out the thoughts of earlier answers: what is rendered is no prefix of
    what follows."""
    from specrun.runtime.chat import ChatTemplate

    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if loop.last else m.content | replace('[think]', '') }}<|end|>{% endfor %}"
    )
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(template))
    chat = Chat(
        (
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "B[think] or not."},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "Delta."},
        )
    )
    assert "Delta." in learnt(tokenizer, chat)
    assert "<|user|>c" not in learnt(tokenizer, chat)


def test_tokens_are_the_runtimes(tokenizer: TargetTokenizer, taught) -> None:
    with Runtime(taught.gguf, "none", n_threads=1, n_ctx=256) as runtime:
        asked = list(CHAT.messages[:2])
        assert tokenizer.prompt(Chat(tuple(asked))) == runtime.chat_prompt(asked)
        assert tokenizer.prompt(Answered("Who?", None)) == runtime.chat_prompt(
            [{"role": "user", "content": "Who?"}]
        )
        text = "Some text, with 13 numbers\n\tand tabs."
        assert tokenizer.tokenize(text) == runtime.vocabulary.tokenize(text)
    assert tokenizer.prompt(PlainText("x")) is None
    assert tokenizer.prompt(CHAT) == tokenizer.prompt(Chat(CHAT.messages[:-1]))


def test_long_texts_are_cut_and_chats_are_not(tokenizer: TargetTokenizer) -> None:
    text = PlainText("one two three four five six seven eight nine ten " * 6)
    whole = tokenizer.encode(text)
    corpus = encode_corpus([text], tokenizer, max_length=32, held_out=0.0)
    assert np.array_equal(
        np.concatenate([sequence.ids for sequence in corpus.sequences]),
        whole.ids[: sum(map(len, corpus.sequences))],
    )
    assert sum(map(len, corpus.sequences)) > len(whole) - 4
    assert corpus.longest == 32
    assert corpus.measured_on_training
    chat = encode_corpus([CHAT] * 3, tokenizer, max_length=40, held_out=0.3)
    assert [len(sequence) for sequence in chat.sequences] == [40] * 3
    assert (len(chat.training), len(chat.held_out), chat.measured_on_training) == (2, 1, False)


def test_nothing_to_learn_within_the_length_is_said(tokenizer: TargetTokenizer) -> None:
    with pytest.raises(ModelError, match="no usable text"):
        encode_corpus([Answered("a long question " * 20, "No.")], tokenizer, max_length=16)
    with pytest.raises(OptionError, match="sequences of 2 tokens"):
        encode_corpus([CHAT], tokenizer, max_length=2)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(FileMissingError, match="is not a folder"):
        TargetTokenizer(tmp_path / "absent")
    with pytest.raises(FileMissingError, match=r"no config\.json"):
        TargetTokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"tokens of .* cannot be read"):
        TargetTokenizer(tmp_path)


def test_a_document_that_the_template_refuses_is_named(
    tokenizer: TargetTokenizer, monkeypatch, tmp_path: Path
) -> None:
    refusing = "{% if messages | length > 1 %}{{ raise_exception('ask first') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "template", ChatTemplate(refusing))
    chat = {"messages": [*CHAT.messages, *CHAT.messages, {"role": "user", "content": "a"}]}
    for name, text in {"d.jsonl": '{"text": "x"}\n%s', "d.json": '[{"text": "x"}, %s]'}.items():
        (tmp_path / name).write_text(text % json.dumps(chat))
        _, document = read_documents([tmp_path / name])
        where = "line 2 of d.jsonl" if name.endswith("l") else "element 2 of d.json"
        for encode in (tokenizer.encode, tokenizer.prompt):
            with pytest.raises(TemplateError, match=rf"^{where}: .*ask first"):
                encode(document)


def test_chats_need_a_template(tokenizer: TargetTokenizer, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer, "template", None)
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.encode(CHAT)
    plain = tokenizer.encode(Answered("Who? ", "Me."))
    assert plain.ids[-1] == tokenizer.eos
    assert tokenizer.text(plain.ids[plain.learnt].tolist()) == "Me.<|end|>"


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.lists(st.integers(4, 90), min_size=1, max_size=30), st.integers(1, 200), st.integers(0, 9)
)
def test_batches_hold_every_sequence_once_within_the_limit(
    lengths: list[int], limit: int, seed: int
) -> None:
    given_lengths = dict(enumerate(lengths))
    groups = plan_batches(given_lengths, random.Random(seed), limit)
    assert sorted(number for group in groups for number in group) == list(given_lengths)
    for group in groups:
        padded = len(group) * max(given_lengths[number] for number in group)
        assert padded <= limit or len(group) == 1
    assert groups == plan_batches(given_lengths, random.Random(seed), limit)


def test_batches_have_room_for_what_texts_become() -> None:
    """Twenty texts of 4 tokens that may become 30, and one that becomes 50: 128 tokens hold four of
    them, or two."""
    short = TokenSequence(np.zeros(4, np.int32), np.ones(4, np.bool_))
    corpus = corpus_of([short] * 21, held_out=0.0)
    assert len(corpus.training_batches(0, 0, 128)) == 1
    wide = replace(corpus, widths=(50, *[30] * 20))
    groups = wide.training_batches(0, 0, 128)
    assert sorted(number for group in groups for number in group) == list(range(21))
    assert sorted(len(group) for group in groups if 0 not in group)[-1] == 4
    assert all(len(group) * (50 if 0 in group else 30) <= 128 for group in groups)


@pytest.mark.parametrize(
    ("count", "share", "aside"), [(1, 0.05, 0), (2, 0.05, 1), (100, 0.1, 10), (9000, 0.1, 256)]
)
def test_a_share_is_held_out_but_not_too_much(count: int, share: float, aside: int) -> None:
    sequence = TokenSequence(np.zeros(4, np.int32), np.ones(4, np.bool_))
    corpus = corpus_of([sequence] * count, held_out=share)
    assert corpus.measured_on_training == (aside == 0)
    assert len(corpus.held_out) == (aside or 1)
    assert sorted((*corpus.training, *(corpus.held_out if aside else ()))) == list(range(count))
    assert len(corpus_of([sequence] * count, held_out=0.0).held_out) == min(count, 256)


def test_epochs_differ_and_repeat(tokenizer: TargetTokenizer, taught) -> None:
    corpus = encode_corpus(read_documents([taught.data]) * 4, tokenizer, max_length=64)
    epochs = [corpus.training_batches(epoch, 0, 128) for epoch in range(3)]
    assert epochs[0] != epochs[1]
    assert epochs[1] == corpus.training_batches(1, 0, 128)
    assert epochs[1] != corpus.training_batches(1, 1, 128)
    batch = corpus.batch(epochs[0][0])
    assert batch.n_tokens == sum(len(corpus.sequences[number]) for number in epochs[0][0])
    assert not (batch.learnt & ~batch.valid).any()
