"""A tiny family: a target that has learnt a few answers, a drafter that has not, their folders and their data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specrun.convert import convert_checkpoint
from specrun.train.batches import collate, encode
from specrun.train.checkpoint import save_folder
from specrun.train.conversations import turn
from specrun.train.data_file import read_documents
from specrun.train.hf_model import HFModel, load_hf_model
from specrun.train.llama import Llama, LlamaShape
from specrun.train.loop import LoopSettings, train
from specrun.train.target_words import TargetWords
from specrun.train.token_corpus import TokenCorpus, encode_corpus
from specrun.train.tokenizer import train_tokenizer

torch.set_num_threads(1)  # before the fixtures of the session, which train

N_WORDS = 300
TARGET = LlamaShape(vocab_size=N_WORDS, hidden_size=64, num_layers=2, intermediate_size=128, num_heads=2)
DRAFT = LlamaShape(vocab_size=N_WORDS, hidden_size=32, num_layers=1, intermediate_size=64, num_heads=2)
# Questions with several answers, so that the target is unsure of the words that tell them apart.
ANSWERS = {
    "first": ("Return the very first thing.", "Raise an error.", "Print all of it twice."),
    "second": ("Delete all that came second.", "Return the second half."),
    "third": ("Wait until a third appears.", "Wait for the thread.", "Stop."),
    "fourth": ("Open the file.", "Open the door of the house."),
}


@dataclass(frozen=True)
class Family:
    """Where everything lies."""

    target: Path
    draft: Path
    data: Path


def question(name: str) -> str:
    return f"What does {name} do?"


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    pairs = [(question(name), answer) for name, answers in ANSWERS.items() for answer in answers]
    tokenizer = train_tokenizer([text for pair in pairs for text in pair] * 2, vocab_size=N_WORDS)
    target = Llama(TARGET)
    batch = collate([encode(turn(*pair), tokenizer) for pair in pairs])
    train(target, lambda epoch: [batch], LoopSettings(steps=40, warmup_steps=3, matrix_lr=0.02))
    save_folder(target, tokenizer, folder / "target")
    save_folder(Llama(DRAFT, seed=1), tokenizer, folder / "draft")
    lines = [json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in pairs]
    (folder / "data.jsonl").write_text("".join(lines))
    return Family(folder / "target", folder / "draft", folder / "data.jsonl")


@pytest.fixture(scope="session")
def draft_gguf(family, tmp_path_factory) -> Path:
    """The untrained drafter for llama.cpp."""
    path = tmp_path_factory.mktemp("gguf") / "draft.gguf"
    convert_checkpoint(family.draft, path, outtype="f32")
    return path


@pytest.fixture(scope="session")
def target(family) -> HFModel:
    return load_hf_model(family.target, torch.device("cpu"))


@pytest.fixture
def draft(family) -> HFModel:
    """The untrained drafter, anew for each test: training changes it."""
    return load_hf_model(family.draft, torch.device("cpu"))


@pytest.fixture(scope="session")
def corpus(family) -> TokenCorpus:
    words = TargetWords(family.target)
    return encode_corpus(read_documents([family.data]), words, max_length=64, held_out=0.3)


@pytest.fixture(scope="session")
def batch(corpus):
    return corpus.batch(corpus.training)
