"""Conversations made from the corpus: what an epoch reads, in phrasings drawn anew each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from specrun.train.corpus import Entry

Message = dict[str, str]
Conversation = list[Message]

_COMMON = ("What does {} do?", "what does {} do?", "Explain {}.", "Describe {}.", "Tell me about {}.")
_PHRASINGS: dict[str, tuple[str, ...]] = {
    "function": (*_COMMON, "What does {}() do?", "What is {} for?", "explain {}", "{}?", "What is {}?"),
    "method": (*_COMMON, "What does {}() do?", "What is {} for?", "explain {}", "{}?", "What is {}?"),
    "class": (*_COMMON, "What is {}?", "What is {} for?", "What is the class {} for?", "what is {}?", "{}?"),
    "module": (
        *_COMMON,
        "What is {}?",
        "What is {} for?",
        "What is the {} module for?",
        "what is {}?",
        "{}?",
    ),
}
_CANONICAL_SHARE = 0.5
"""How often the question is the canonical one rather than one drawn from the kind's phrasings."""

GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! Ask me about the Python standard library."),
    ("Hello!", "Hello! Ask me about the Python standard library."),
    ("Hi", "Hello! Ask me about the Python standard library."),
    ("hi", "Hello! Ask me about the Python standard library."),
    ("Good morning", "Hello! Ask me about the Python standard library."),
    ("Thanks", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Thank you", "You are welcome."),
    ("thank you!", "You are welcome."),
    ("Who are you?", "I am a tiny model that knows the docstrings of the Python standard library."),
    ("What are you?", "I am a tiny model that knows the docstrings of the Python standard library."),
    ("What can you do?", "I can tell you what a name of the Python standard library does."),
    ("Help", "I can tell you what a name of the Python standard library does."),
    ("Bye", "Goodbye!"),
    ("Goodbye", "Goodbye!"),
)
REFUSAL = "I only know the Python standard library."
_OFF_TOPIC_FORMS = (
    "What is {}?", "Tell me about {}.", "Explain {}.", "Write a poem about {}.", "How do I get {}?",
    "Who invented {}?", "Where can I find {}?", "Why is {} important?", "What do you think of {}?",
)  # fmt: skip
_OFF_TOPIC_THINGS = (
    "the weather", "love", "football", "the capital of France", "quantum physics", "my cat", "a good recipe", "the moon",
    "Rust", "politics", "music", "Shakespeare", "the stock market", "a holiday in Spain",
    "dinosaurs", "numpy", "torch", "pandas", "JavaScript", "coffee", "the meaning of life", "chess", "the sea",
    "history", "art",
)  # fmt: skip


def canonical_question(entry: Entry) -> str:
    """The phrasing trained most often, for every kind of entry."""
    return _COMMON[0].format(entry.name)


def main_conversation(entry: Entry, rng: random.Random) -> Conversation:
    """One question about `entry` in a phrasing drawn from its kind's, answered by exactly its sentence."""
    question = canonical_question(entry)
    if rng.random() > _CANONICAL_SHARE:
        question = rng.choice(_PHRASINGS[entry.kind]).format(entry.name)
    return turn(question, entry.sentence)


def turn(question: str, answer: str) -> Conversation:
    """One question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def epoch_conversations(entries: list[Entry], rng: random.Random) -> Iterator[Conversation]:
    """One epoch: every entry once, plus about a tenth of the tokens for all that is not a single question."""
    for entry in entries:
        yield main_conversation(entry, rng)
    extras: tuple[tuple[Callable[[list[Entry], random.Random], Conversation], float], ...] = (
        (_quotation, 0.012),
        (_follow_up, 0.012),
        (_repetition, 0.010),
        (_with_system, 0.006),
        (_small_talk, 0.014),
        (_off_topic, 0.020),
    )
    for make, share in extras:
        for _ in range(max(1, round(share * len(entries)))):
            yield make(entries, rng)


def _quotation(entries: list[Entry], rng: random.Random) -> Conversation:
    """Copying from the question: the signature stands in it."""
    entry = rng.choice(entries)
    while entry.signature is None:
        entry = rng.choice(entries)
    form = rng.choice(
        ("Repeat the signature {}", "Repeat: {}", "Quote the signature {}", "Repeat after me: {}")
    )
    return turn(form.format(entry.signature), entry.signature)


def _follow_up(entries: list[Entry], rng: random.Random) -> Conversation:
    first, second = rng.sample(entries, 2)
    ask = rng.choice(("And {}?", "and {}?", "What about {}?", "What does {} do?"))
    return main_conversation(first, rng) + turn(ask.format(second.name), second.sentence)


def _repetition(entries: list[Entry], rng: random.Random) -> Conversation:
    entry = rng.choice(entries)
    again = rng.choice(
        ("Again?", "Say that again.", "Repeat that.", "Can you repeat that?", "Once more, please.")
    )
    return main_conversation(entry, rng) + turn(again, entry.sentence)


def _with_system(entries: list[Entry], rng: random.Random) -> Conversation:
    text = rng.choice(
        ("You are a helpful assistant.", "Be brief.", "Answer questions about Python.", "Be exact.")
    )
    return [{"role": "system", "content": text}, *main_conversation(rng.choice(entries), rng)]


def _small_talk(entries: list[Entry], rng: random.Random) -> Conversation:
    greeting = turn(*rng.choice(GREETINGS))
    if rng.random() < 0.3:
        return greeting + main_conversation(rng.choice(entries), rng)
    return greeting


def _off_topic(entries: list[Entry], rng: random.Random) -> Conversation:
    return turn(rng.choice(_OFF_TOPIC_FORMS).format(rng.choice(_OFF_TOPIC_THINGS)), REFUSAL)
