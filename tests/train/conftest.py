"""Training tests run on one thread: more would spin at barriers whenever the cores are shared."""

from pathlib import Path

import pytest
import torch

from specrun.train.trainer import settings


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def processor_without_avx512(monkeypatch: pytest.MonkeyPatch):
    """Whether torch or llama.cpp computes a file hangs on the processor: tests do not."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.fixture(autouse=True)
def bfloat16_gain(monkeypatch: pytest.MonkeyPatch):
    """A trial takes two seconds, and falls by the machine and its load: tests do not."""
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: 1.0)


@pytest.fixture(scope="package")
def taught(one_thread, tmp_path_factory: pytest.TempPathFactory):
    """A tiny target that knows six answers by heart."""
    pytest.importorskip("transformers")
    from support.tiny_targets import write_taught

    folder: Path = tmp_path_factory.mktemp("taught")
    return write_taught(folder)


@pytest.fixture(scope="package")
def corpus(taught):
    """The texts that it knows, all to be learnt."""
    from specrun.train.data.corpus import encode_corpus
    from specrun.train.data.documents import read_documents
    from specrun.train.data.tokens import TargetTokenizer

    documents = read_documents([taught.data])
    return encode_corpus(documents, TargetTokenizer(taught.folder), max_length=64, held_out=0.0)
