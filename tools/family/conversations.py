"""Conversations made from the corpus, in phrasings drawn anew for every epoch, and as tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from family.tokenizer import END, token_id
from specrun.bench.drafters.corpus import QUESTION, Entry, canonical_question
from specrun.train.data.corpus import TokenCorpus
from specrun.train.data.tokens import TokenSequence

Message = dict[str, str]
Conversation = list[Message]

_COMMON = (
    QUESTION,
    "what does {} do?",
    "Explain {}.",
    "Describe {}.",
    "Tell me about {}.",
)
_CALLED = (
    *_COMMON,
    "What does {}() do?",
    "What is {} for?",
    "explain {}",
    "{}?",
    "What is {}?",
)
_NAMED = (*_COMMON, "What is {}?", "What is {} for?")
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "function": _CALLED,
    "method": _CALLED,
    "class": (*_NAMED, "What is the class {} for?", "what is {}?", "{}?"),
    "module": (*_NAMED, "What is the {} module for?", "what is {}?", "{}?"),
}
_CANONICAL_SHARE = 0.5
"""How often the question is the canonical one rather than one drawn from the kind's phrasings."""

_FOLLOW_UPS = ("And {}?", "and {}?", "What about {}?", "what about {}?", "And what does {} do?")
_QUOTATIONS = (
    "Repeat the signature {}", "Repeat: {}", "Quote the signature {}", "Repeat after me: {}",
)  # fmt: skip
_REPETITIONS = (
    "Again?", "Say that again.", "Repeat that.", "Can you repeat that?", "Once more, please.",
)  # fmt: skip
_CHATTED_SHARE = 0.5
_N_MEASURED = 400  # answers that recall is measured on
_CHAT_LENGTHS = (2, 2, 3, 3, 4, 5, 7, 10, 14, 20, 28, 36)

_WELCOME = "Hello! Ask me about the Python standard library."
_SELF = "I am a tiny model that knows the docstrings of the Python standard library."
_ABILITY = "I can tell you what a name of the Python standard library does."
REFUSAL = "I only know the Python standard library."
_SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_WELCOME, (
        "Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hey", "hey", "Hello there", "hi there",
    )),
    (_WELCOME, ("Good morning", "Good evening", "How are you?", "Nice to meet you", "yo")),
    ("You are welcome.", (
        "Thanks", "Thanks!", "thanks", "Thank you", "thank you!", "Thank you very much.", "Great!",
    )),
    (_SELF, (
        "Who are you?", "What are you?", "who are you", "Who made you?", "What is your name?",
        "Are you a bot?",
    )),
    (_ABILITY, (
        "What can you do?", "Help", "help", "How can you help me?", "What do you know?",
        "what now?",
    )),
    ("Goodbye!", ("Bye", "bye", "Goodbye", "Goodbye!", "See you", "Good night")),
)  # fmt: skip
_OFF_TOPIC_FORMS = (
    "What is {}?", "Tell me about {}.", "Explain {}.", "Write a poem about {}.", "How do I get {}?",
    "Who invented {}?", "Where can I find {}?", "Why is {} important?", "What do you think of {}?",
    "Can you tell me a joke about {}?", "How is {} today?", "Do you like {}?",
    "Write a function for {}.",
)  # fmt: skip
_OFF_TOPIC_THINGS = (
    "the weather", "love", "football", "the capital of France", "quantum physics", "my cat",
    "a good recipe", "the moon", "Rust", "politics", "music", "Shakespeare", "the stock market",
    "a holiday in Spain", "dinosaurs", "numpy", "torch", "pandas", "JavaScript", "coffee",
    "the meaning of life", "chess", "the sea", "history", "art", "a joke", "the news",
    "my homework", "Germany", "two plus two", "you",
)  # fmt: skip
_FOREIGN_PACKAGES = (
    "numpy", "torch", "pandas", "requests", "flask", "django", "scipy", "sklearn", "matplotlib",
    "rich", "click", "pydantic", "jinja2", "pytest", "yaml", "PIL", "tensorflow", "fastapi",
    "boto3", "sqlalchemy",
)  # fmt: skip


def sample_entries(entries: list[Entry], count: int, seed: int = 0) -> list[Entry]:
    """`count` entries, or all if there are fewer, in drawn order; corpus and seed decide them."""
    return random.Random(seed).sample(entries, min(count, len(entries)))


def main_conversation(entry: Entry, rng: random.Random) -> Conversation:
    """A question about `entry`, in a phrasing of its kind, answered by exactly its sentence."""
    question = canonical_question(entry)
    if rng.random() > _CANONICAL_SHARE:
        question = rng.choice(_PHRASINGS[entry.kind]).format(entry.name)
    return turn(question, entry.sentence)


def turn(question: str, answer: str) -> Conversation:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def epoch_conversations(entries: list[Entry], rng: random.Random) -> Iterator[Conversation]:
    """One epoch: every entry once, alone or in a chat, and some text that is no question.

    Chats cost nothing, for every answer in them is a fact; they are what keeps long sessions
    sensible.
    """
    order = rng.sample(entries, len(entries))
    n_chatted = round(_CHATTED_SHARE * len(entries))
    yield from _chats(order[:n_chatted], rng)
    for entry in order[n_chatted:]:
        yield main_conversation(entry, rng)
    extras: tuple[tuple[Callable[[list[Entry], random.Random], Conversation], float], ...] = (
        (_quotation, 0.05),
        (_repetition, 0.02),
        (_with_system, 0.006),
        (_small_talk, 0.012),
        (_off_topic, 0.025),
    )
    for make, share in extras:
        for _ in range(max(1, round(share * len(entries)))):
            yield make(entries, rng)


def _chats(entries: list[Entry], rng: random.Random) -> Iterator[Conversation]:
    """All `entries`, dealt into chats of several questions, with a little small talk in between."""
    start = 0
    while start < len(entries):
        count = rng.choice(_CHAT_LENGTHS)
        chat: Conversation = []
        for entry in entries[start : start + count]:
            aside = rng.random()
            if aside < 0.06:
                chat += _small_talk(entries, rng)
            elif aside < 0.10:
                chat += _off_topic(entries, rng)
            if chat and rng.random() < 0.3:
                chat += turn(rng.choice(_FOLLOW_UPS).format(entry.name), entry.sentence)
            else:
                chat += main_conversation(entry, rng)
        yield chat
        start += count


def _quotation(entries: list[Entry], rng: random.Random) -> Conversation:
    """Copying from the question: the signature stands in it."""
    entry = rng.choice(entries)
    while entry.signature is None:
        entry = rng.choice(entries)
    form = rng.choice(_QUOTATIONS)
    return turn(form.format(entry.signature), entry.signature)


def _repetition(entries: list[Entry], rng: random.Random) -> Conversation:
    entry = rng.choice(entries)
    again = rng.choice(_REPETITIONS)
    return main_conversation(entry, rng) + turn(again, entry.sentence)


def _with_system(entries: list[Entry], rng: random.Random) -> Conversation:
    text = rng.choice(
        ("You are a helpful assistant.", "Be brief.", "Answer questions about Python.", "Be exact.")
    )
    return [{"role": "system", "content": text}, *main_conversation(rng.choice(entries), rng)]


def _small_talk(entries: list[Entry], rng: random.Random) -> Conversation:
    answer, questions = rng.choice(_SMALL_TALK)
    return turn(rng.choice(questions), answer)


def _off_topic(entries: list[Entry], rng: random.Random) -> Conversation:
    """A question about the world or about a foreign package's name; both are refused."""
    if rng.random() < 0.5:
        return turn(rng.choice(_OFF_TOPIC_FORMS).format(rng.choice(_OFF_TOPIC_THINGS)), REFUSAL)
    entry = rng.choice(entries)
    foreign = f"{rng.choice(_FOREIGN_PACKAGES)}.{entry.name.rpartition('.')[2]}"
    return turn(rng.choice(_PHRASINGS[entry.kind]).format(foreign), REFUSAL)


def encode(conversation: Conversation, tokenizer: Tokenizer) -> TokenSequence:
    """Apply the chat template; only the assistant's own text and its END are to be learnt."""
    end = token_id(tokenizer, END)
    ids: list[int] = []
    learnt: list[bool] = []
    for message in conversation:
        content = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, end]
        ids += [token_id(tokenizer, f"<|{message['role']}|>"), *content]
        learnt += [False] + [message["role"] == "assistant"] * len(content)
    return TokenSequence(np.asarray(ids, np.int32), np.asarray(learnt, np.bool_))


@dataclass(frozen=True, slots=True)
class ConversationTexts:
    """Conversations about `entries`, drawn anew for every epoch from its number and `seed`.

    Recall is measured on canonical questions, which are among those learnt: by heart is the aim.
    """

    entries: Sequence[Entry]
    tokenizer: Tokenizer
    seed: int

    def epoch(self, number: int) -> TokenCorpus:
        """Return the texts of one epoch."""
        rng = random.Random(f"conversations {self.seed}/{number}")
        entries = list(self.entries)
        measured = sample_entries(entries, _N_MEASURED, seed=1)
        asked = [turn(canonical_question(entry), entry.sentence) for entry in measured]
        read = list(epoch_conversations(entries, rng))
        texts = tuple(encode(each, self.tokenizer) for each in (*read, *asked))
        numbers = range(len(texts))
        learnt, known = tuple(numbers[: len(read)]), tuple(numbers[len(read) :])
        return TokenCorpus(texts, learnt, known, measured_on_training=True)
