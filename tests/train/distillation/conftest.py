"""The tiny family that all tests of distillation share, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_family import Family, make_family

from specrun.convert import convert_checkpoint
from specrun.train.data.corpus import TokenCorpus, encode_corpus
from specrun.train.data.documents import read_documents
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.target.hf_model import HFModel, load_hf_model

torch.set_num_threads(1)  # before the fixtures of the session, which train


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


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
    tokenizer = TargetTokenizer(family.target)
    return encode_corpus(read_documents([family.data]), tokenizer, max_length=64, held_out=0.3)


@pytest.fixture(scope="session")
def batch(corpus):
    return corpus.batch(corpus.training)
