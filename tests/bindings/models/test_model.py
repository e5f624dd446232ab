"""Models: their properties, and files that cannot be used."""

from __future__ import annotations

import os
import struct

import pytest
from support.gguf_mutants import Entry, take_apart
from support.tiny_models import TEMPLATE

from specrun.bindings.errors import (
    ClosedError,
    FileMissingError,
    MalformedFileError,
    ModelError,
    ModelLoadError,
    OptionError,
)
from specrun.bindings.models import Model, watched_loading


@pytest.fixture(scope="module")
def model(tiny_model):
    with Model(tiny_model) as opened:
        yield opened


def test_a_model_describes_itself(model):
    assert model.architecture == "llama"
    assert "llama" in model.description
    assert (model.n_embd, model.n_layer, model.n_ctx_train) == (32, 2, 1024)
    assert model.vocabulary.size == 320
    assert model.can_branch
    assert model.can_generate
    assert model.n_bytes == 4 * model.n_params  # float32
    assert model.n_bytes < os.path.getsize(model.path)


def test_metadata_holds_the_scalars(model):
    metadata = model.metadata()
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.context_length"] == "1024"
    assert metadata["tokenizer.ggml.add_bos_token"] == "false"
    assert metadata["tokenizer.chat_template"] == TEMPLATE


def test_the_chat_template_is_whole(model, tiny_small_vocab):
    assert model.chat_template == TEMPLATE
    with Model(tiny_small_vocab) as other:
        assert other.chat_template is None


@pytest.mark.parametrize("use_mmap", [True, False])
def test_a_model_loads_with_and_without_mmap(tiny_model, use_mmap):
    with Model(tiny_model, use_mmap=use_mmap) as model:
        assert model.vocabulary.tokenize("a") == [97]


def test_a_missing_file(tmp_path):
    with pytest.raises(FileMissingError, match=r"nowhere\.gguf") as caught:
        Model(tmp_path / "nowhere.gguf")
    assert caught.value.exit_code == 3


def test_a_directory(tmp_path):
    with pytest.raises(ModelError, match=r"directory|not a") as caught:
        Model(tmp_path)
    assert caught.value.exit_code == 3


CONTENTS = {
    "text": b"this is not a model at all, but a text of some length\n" * 10,
    "array-of-2**63-elements": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + struct.pack("<Q", 1)
    + b"a"
    + struct.pack("<IIQ", 9, 0, 2**63),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_is_no_model(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(MalformedFileError) as caught:
        Model(path)
    assert caught.value.exit_code == 3
    assert "bad.gguf" in str(caught.value)


def test_a_sound_header_that_llama_refuses_says_why(tiny_model, tmp_path):
    data = tiny_model.read_bytes()
    assert data.count(b"llama.block_count") == 1
    path = tmp_path / "refused.gguf"
    path.write_bytes(data.replace(b"llama.block_count", b"llama.block_cpunt"))
    with pytest.raises(ModelLoadError, match="block_count") as caught:
        Model(path)
    assert caught.value.exit_code == 3


def test_an_architecture_llama_does_not_know(tiny_model, tmp_path):
    data = tiny_model.read_bytes()
    path = tmp_path / "unknown.gguf"
    path.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", 1))
    with pytest.raises(ModelLoadError, match=r"lxama.*-md"):
        Model(path)


@pytest.mark.parametrize(
    ("token", "named"),
    [(b"aa", "'aa' twice .* 256 and 257"), (b"a\0", "'a' twice .* 97 and 257")],
    ids=["same", "cut"],
)
def test_a_token_that_is_there_twice_is_refused_before_llama_aborts(
    tiny_model, tmp_path, token, named
):
    """Tokens 256 and 257 are "aa" and "ab"; llama.cpp asserts that all differ and ends the
    process."""
    data = tiny_model.read_bytes()
    two = b"\2\0\0\0\0\0\0\0aa\2\0\0\0\0\0\0\0ab"
    assert data.count(two) == 1
    path = tmp_path / "twice.gguf"
    path.write_bytes(data.replace(two, two.replace(b"ab", token)))
    with pytest.raises(MalformedFileError, match=named):
        Model(path)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_for_every_text_must_be_there(tiny_model, tmp_path, name):
    """Without keys glm4's vocabulary has no bos token; its eos token is 11, and it is there."""
    parts = take_apart(tiny_model)
    keys = {b"tokenizer.ggml.pre": (8, struct.pack("<Q", 4) + b"glm4")}
    keys[f"tokenizer.ggml.add_{name}_token".encode()] = (7, b"\1")
    gone = {*keys, f"tokenizer.ggml.{name}_token_id".encode()}
    kept = [entry for entry in parts.entries if entry.key not in gone]
    parts.entries = kept + [Entry(key, *value) for key, value in keys.items()]
    path = tmp_path / "asks.gguf"
    path.write_bytes(parts.laid_out())
    if name == "bos":
        with pytest.raises(MalformedFileError, match="puts a token bos to every text, and has non"):
            Model(path, vocab_only=True)
        return
    with Model(path, vocab_only=True) as model:
        assert model.vocabulary.tokenize("a") == [97, 11]


def test_layers_below_all_are_refused(tiny_model):
    with pytest.raises(OptionError, match="n_gpu_layers"):
        Model(tiny_model, n_gpu_layers=-2)


def test_loading_reports_progress_and_can_be_stopped(tiny_model):
    seen: list[float] = []
    with watched_loading(lambda share: seen.append(share) is None), Model(tiny_model):
        assert seen == sorted(seen)
        assert seen[-1] == 1.0
    with watched_loading(lambda _share: False), pytest.raises(ModelLoadError):
        Model(tiny_model)
    Model(tiny_model).close()


@pytest.mark.parametrize(
    "name", ["n_embd", "n_layer", "chat_template", "description", "can_branch"]
)
def test_a_closed_model_raises(tiny_model, name):
    model = Model(tiny_model)
    model.close()
    model.close()
    with pytest.raises(ClosedError):
        getattr(model, name)
