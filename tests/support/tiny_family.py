"""A target that has learnt a few answers, a drafter that hardly has, their folders and data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from family.conversations import encode, turn
from family.llama import Llama, LlamaLearner
from family.tokenizer import save_folder, train_tokenizer
from specrun.train.data.corpus import TokenCorpus
from specrun.train.data.tokens import TokenSequence
from specrun.train.target.shape import ModelShape
from specrun.train.trainer.settings import TrainerSettings
from specrun.train.trainer.trainer import train_learner

VOCAB_SIZE = 300
DRAFT_STEPS = 26
TARGET = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=64, n_layers=2, feed_forward=128, n_heads=2, n_kv_heads=2
)
DRAFT = ModelShape(
    vocab_size=VOCAB_SIZE, hidden=32, n_layers=1, feed_forward=64, n_heads=2, n_kv_heads=2
)
# Questions with several answers, so that the target is unsure of the tokens that tell them apart.
COPIES = 3  # enough texts to hold some out
ANSWERS = {
    "first": ("Return the very first thing.", "Raise an error.", "Print all of it twice."),
    "second": ("Delete all that came second.", "Return the second half."),
    "third": ("Wait until a third appears.", "Wait for the thread.", "Stop."),
    "fourth": ("Open the file.", "Open the door of the house."),
}


N_TEXTS = COPIES * sum(len(answers) for answers in ANSWERS.values())


@dataclass(frozen=True)
class Family:
    """Where everything lies."""

    target: Path
    draft: Path
    data: Path


def question(name: str) -> str:
    return f"What does {name} do?"


def all_in_one(texts: list[TokenSequence]) -> TokenCorpus:
    """All texts to learn, and to measure."""
    numbers = tuple(range(len(texts)))
    return TokenCorpus(tuple(texts), numbers, numbers, measured_on_training=True)


def tiny_settings(steps: int, warmup_steps: int, learning_rate: float = 0.02) -> TrainerSettings:
    """As the demo family is trained: Muon, a plateau, then a straight line."""
    return TrainerSettings(
        steps,
        learning_rate,
        warmup_steps=warmup_steps,
        decay=0.5,
        betas=(0.9, 0.98),
        matrix_optimizer="muon",
    )


def make_family(folder: Path) -> Family:
    """Train the target and write everything into `folder`."""
    pairs = [(question(name), answer) for name, answers in ANSWERS.items() for answer in answers]
    tokenizer = train_tokenizer(
        [text for pair in pairs for text in pair] * 2, vocab_size=VOCAB_SIZE
    )
    target = Llama(TARGET)
    corpus = all_in_one([encode(turn(*pair), tokenizer) for pair in pairs])
    train_learner(
        LlamaLearner(target, other_rate=0.25), corpus, tiny_settings(steps=40, warmup_steps=3)
    )
    save_folder(target, tokenizer, folder / "target")
    # It speaks, and badly: what samples nonsense only learns to sample other nonsense.
    draft = Llama(DRAFT, seed=1)
    train_learner(
        LlamaLearner(draft, other_rate=0.25),
        corpus,
        tiny_settings(steps=DRAFT_STEPS, warmup_steps=1),
    )
    save_folder(draft, tokenizer, folder / "draft")
    lines = [json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in pairs]
    (folder / "data.jsonl").write_text("".join(lines) * COPIES)
    return Family(folder / "target", folder / "draft", folder / "data.jsonl")
