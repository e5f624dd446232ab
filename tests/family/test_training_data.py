"""Tokenizer, conversations, loss masks and batches."""

import itertools
import random

import jinja2
import pytest
from support.tiny_family import all_in_one

from family.conversations import (
    REFUSAL,
    ConversationTexts,
    encode,
    epoch_conversations,
    main_conversation,
    sample_entries,
    turn,
)
from family.llama import next_labels
from family.models import read_corpus, write_corpus
from family.tokenizer import (
    ASSISTANT,
    CHAT_TEMPLATE,
    END,
    SPECIAL_TOKENS,
    load_tokenizer,
    save_tokenizer_files,
    token_id,
    train_tokenizer,
)
from specrun.bench.drafters.corpus import Entry

AGAIN = ("Again", "Say that", "Repeat that", "Can you repeat", "Once more")
ENTRIES = [
    Entry(f"module{i}.name{i}", kind, f"name{i}(x, y={i})", f"Return the number {i} of all things.")
    for i, kind in enumerate(["function", "class", "module", "method"] * 25)
]


@pytest.fixture(scope="module")
def tokenizer():
    conversations = epoch_conversations(ENTRIES, random.Random(0))
    return train_tokenizer((m["content"] for c in conversations for m in c), vocab_size=400)


@pytest.mark.parametrize(
    "text", ["hello", " two  spaces\n\n", "naïve 🦙🏽 emoji 漢字", "a\tb\x00c", "x" * 300]
)
def test_the_tokenizer_keeps_every_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_files_load(tokenizer, tmp_path):
    assert [token_id(tokenizer, token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    save_tokenizer_files(tokenizer, tmp_path, 2048)
    assert load_tokenizer(tmp_path).encode("some text").ids == tokenizer.encode("some text").ids
    with pytest.raises(ValueError, match="no token"):
        token_id(tokenizer, "<|nobody|>")


def test_samples_are_what_the_chat_template_renders(tokenizer):
    conversation = [{"role": "system", "content": "Be brief."}, *turn("Hi?", "Hello 🙂.")]
    rendered = jinja2.Template(CHAT_TEMPLATE).render(messages=conversation)
    assert (
        tokenizer.decode(encode(conversation, tokenizer).ids, skip_special_tokens=False) == rendered
    )
    prompt = jinja2.Template(CHAT_TEMPLATE).render(
        messages=conversation[:-1], add_generation_prompt=True
    )
    assert rendered.startswith(prompt)
    assert prompt.endswith(ASSISTANT)


def test_exactly_the_assistants_tokens_are_learnt(tokenizer):
    sample = encode(turn("What?", "This.") + turn("Again?", "That."), tokenizer)
    learnt = sample.ids[sample.learnt].tolist()
    assert tokenizer.decode(learnt, skip_special_tokens=False) == f"This.{END}That.{END}"
    batch = all_in_one(
        [sample, encode(turn("A longer question than that?", "Yes."), tokenizer)]
    ).batch((0, 1))
    labels = next_labels(batch)
    assert labels[0][labels[0] != -1].tolist() == learnt
    for row, position in (labels != -1).nonzero().tolist():
        assert labels[row, position] == batch.ids[row, position + 1]


def test_an_epoch_asks_everything_once_and_a_little_more():
    conversations = list(epoch_conversations(ENTRIES, random.Random(1)))
    answers = [m["content"] for c in conversations for m in c if m["role"] == "assistant"]
    assert {entry.sentence for entry in ENTRIES} <= set(answers)
    assert sum(answer.startswith("Return the number") for answer in answers) < 1.1 * len(ENTRIES)
    assert REFUSAL in answers
    assert max(len(c) for c in conversations) >= 8


def test_questions_name_what_their_answers_are_about():
    by_sentence = {entry.sentence: entry for entry in ENTRIES}
    named = set()
    for conversation in epoch_conversations(ENTRIES, random.Random(2)):
        for asked, answered in itertools.pairwise(conversation):
            entry = by_sentence.get(answered["content"])
            if (
                entry is not None
                and asked["role"] == "user"
                and not asked["content"].startswith(AGAIN)
            ):
                assert entry.name in asked["content"]
                named.add(entry.name)
    assert len(named) == len(ENTRIES)


def test_the_canonical_question_is_asked_most():
    rng = random.Random(0)
    asked = [main_conversation(ENTRIES[0], rng)[0]["content"] for _ in range(400)]
    assert asked.count("What does module0.name0 do?") > 150
    assert len(set(asked)) >= 8


def test_batches_depend_on_epoch_and_seed_alone(tokenizer):
    def read(epoch, seed):
        texts = ConversationTexts(ENTRIES, tokenizer, seed).epoch(epoch)
        return [
            texts.batch(numbers).ids.tolist()
            for numbers in texts.training_batches(epoch, seed, 512)
        ]

    assert read(3, 0) == read(3, 0)
    assert read(3, 0) != read(4, 0)
    assert read(3, 0) != read(3, 1)
    assert all(len(rows) * len(rows[0]) <= 512 for rows in read(3, 0))


def test_recall_is_always_measured_on_the_same_questions(tokenizer):
    first, later = (ConversationTexts(ENTRIES, tokenizer, 0).epoch(epoch) for epoch in (0, 7))
    measured = [
        [text.sequences[number].ids.tolist() for number in text.held_out] for text in (first, later)
    ]
    assert measured[0] == measured[1]
    assert len(measured[0]) == len(ENTRIES)
    assert not set(first.held_out) & set(first.training)
    assert first.measured_on_training


def test_writing_and_reading(tmp_path):
    write_corpus(ENTRIES, tmp_path / "corpus.jsonl")
    assert read_corpus(tmp_path / "corpus.jsonl") == ENTRIES


def test_samples_depend_on_the_seed_alone():
    first = sample_entries(ENTRIES, 20, seed=3)
    assert first == sample_entries(list(ENTRIES), 20, seed=3)
    assert first != sample_entries(ENTRIES, 20, seed=4)
    assert len({entry.name for entry in first}) == 20
