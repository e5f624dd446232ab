"""A tiny family: a target that has learnt a few answers, a drafter that hardly has, their folders and their data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specrun.train.batches import collate, encode
from specrun.train.checkpoint import save_folder
from specrun.train.conversations import turn
from specrun.train.llama import Llama, LlamaShape
from specrun.train.loop import LoopSettings, train
from specrun.train.tokenizer import train_tokenizer

N_WORDS = 300
DRAFT_STEPS = 26
TARGET = LlamaShape(vocab_size=N_WORDS, hidden_size=64, num_layers=2, intermediate_size=128, num_heads=2)
DRAFT = LlamaShape(vocab_size=N_WORDS, hidden_size=32, num_layers=1, intermediate_size=64, num_heads=2)
# Questions with several answers, so that the target is unsure of the words that tell them apart.
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


def make_family(folder: Path) -> Family:
    """Train the target and write everything into `folder`."""
    pairs = [(question(name), answer) for name, answers in ANSWERS.items() for answer in answers]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair] * 2, vocab_size=N_WORDS)
    target = Llama(TARGET)
    batch = collate([encode(turn(*pair), tokenizer) for pair in pairs])
    train(target, lambda epoch: [batch], LoopSettings(steps=40, warmup_steps=3, matrix_lr=0.02))
    save_folder(target, tokenizer, folder / "target")
    # It speaks, and badly: what samples nonsense only learns to sample other nonsense.
    draft = Llama(DRAFT, seed=1)
    train(draft, lambda epoch: [batch], LoopSettings(steps=DRAFT_STEPS, warmup_steps=1, matrix_lr=0.02))
    save_folder(draft, tokenizer, folder / "draft")
    lines = [json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in pairs]
    (folder / "data.jsonl").write_text("".join(lines) * COPIES)
    return Family(folder / "target", folder / "draft", folder / "data.jsonl")
