"""GGUF files read back into Hugging Face folders: the same logits, the same tokens, the same file
again."""

import json

import numpy as np
import pytest
import torch
from support.saved_llama import load_folder
from support.tiny_models import fresh_logits

from family.llama import Llama
from family.tokenizer import save_folder, train_tokenizer
from specrun.bindings.errors import FileMissingError, ModelError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.convert import convert_checkpoint, quantize_model
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.demo import demo_drafters
from specrun.train.data.tokens import TargetTokenizer
from specrun.train.target.from_gguf import folder_from_gguf
from specrun.train.target.hf_model import load_hf_model
from specrun.train.target.shape import ModelShape

SHAPE = ModelShape(
    vocab_size=300,
    hidden=64,
    n_layers=2,
    feed_forward=96,
    n_heads=4,
    n_kv_heads=4,
    rope_theta=5000.0,
)
TEXT = "Return the very first thing. Grüße <|user|> 東京 3.14  \n\tx"
TOKENS = [5, 9, 270, 33, 120, 121, 299, 4, 1, 77, 80, 12, 200, 6, 6, 6]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A model whose weights are large enough for every one to matter, as a folder."""
    folder = tmp_path_factory.mktemp("original")
    model = Llama(SHAPE)
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn(parameter.shape, generator=source) * spread)
    save_folder(
        model, train_tokenizer(["Return the very first thing."] * 4, vocab_size=300), folder
    )
    return folder


def torch_logits(folder, tokens=TOKENS):
    with torch.no_grad():
        return load_folder(folder)(torch.tensor([tokens]))[0].numpy()


def native_logits(path, tokens=TOKENS):
    with Model(path) as model:
        return fresh_logits(model, tokens)


def test_weights_come_back_bit_by_bit(original, tmp_path):
    convert_checkpoint(original, tmp_path / "model.gguf", outtype="f32")
    folder = folder_from_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = (load_folder(place).state_dict() for place in (original, folder))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    native = native_logits(tmp_path / "model.gguf")
    assert np.abs(torch_logits(folder) - native).max() < 1e-4 * np.abs(native).max()


def test_rows_of_heads_left_as_they_are_would_be_seen(original, tmp_path, monkeypatch):
    convert_checkpoint(original, tmp_path / "model.gguf", outtype="f32")
    monkeypatch.setattr("specrun.train.target.from_gguf.in_halves", lambda matrix, n_heads: matrix)
    folder = folder_from_gguf(tmp_path / "model.gguf", tmp_path / "wrong")
    native = native_logits(tmp_path / "model.gguf")
    assert np.abs(torch_logits(folder) - native).max() > 0.05 * np.abs(native).max()


def test_quantized_weights_become_the_numbers_they_stand_for(original, tmp_path):
    """llama.cpp computes the same from the folder; from the file itself it rounds inputs to 8 bits
    too."""
    convert_checkpoint(original, tmp_path / "whole.gguf", outtype="f32")
    quantize_model(tmp_path / "whole.gguf", tmp_path / "small.gguf", "Q8_0")
    folder = folder_from_gguf(tmp_path / "small.gguf", tmp_path / "back")
    convert_checkpoint(folder, tmp_path / "again.gguf", outtype="f32")
    found, size = torch_logits(folder), np.abs(torch_logits(folder)).max()
    assert np.abs(found - native_logits(tmp_path / "again.gguf")).max() < 1e-4 * size
    from_file = np.abs(found - native_logits(tmp_path / "small.gguf")).max()
    assert 1e-4 * size < from_file < 0.05 * size
    assert np.abs(found - torch_logits(original)).max() > 1e-3 * size
    quantize_model(tmp_path / "again.gguf", tmp_path / "small again.gguf", "Q8_0")
    same = np.abs(
        native_logits(tmp_path / "small.gguf") - native_logits(tmp_path / "small again.gguf")
    ).max()
    assert same < 0.01 * size


def test_grouped_and_untied_heads(tmp_path):
    """What the project's own torch Llama has not, transformers' has."""
    path = tmp_path / "grouped.gguf"
    write_random_llama(path, RandomLlama(vocab_size=300, heads=4, kv_heads=2, width=64))
    folder = folder_from_gguf(path, tmp_path / "back")
    with torch.no_grad():
        found = (
            load_hf_model(folder, torch.device("cpu"))
            .module(input_ids=torch.tensor([TOKENS]))
            .logits[0]
            .numpy()
        )
    native = native_logits(path)
    assert np.abs(found - native).max() < 1e-3 * np.abs(native).max()


def test_the_tokenizer_comes_back(original, tmp_path):
    convert_checkpoint(original, tmp_path / "model.gguf", outtype="f32")
    folder = folder_from_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = TargetTokenizer(original), TargetTokenizer(folder)
    chat = [{"role": "user", "content": TEXT}]
    assert after.tokenize(TEXT) == before.tokenize(TEXT)
    assert after.template.render(chat) == before.template.render(chat)
    assert after.eos == before.eos == 0
    with Model(tmp_path / "model.gguf", vocab_only=True) as model:
        assert model.vocabulary.tokenize(TEXT, parse_special=True) == after.tokenize(TEXT)


def test_the_embedded_drafter_can_be_read_back(tmp_path):
    path = demo_drafters()["draft"]
    folder = folder_from_gguf(path, tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"], config["eos_token_id"]) == (
        1e-5,
        10000.0,
        0,
    )
    convert_checkpoint(folder, tmp_path / "again.gguf", outtype="f32")
    tokens = TargetTokenizer(folder).tokenize(
        "<|user|>What does shutil.copytree do?<|end|><|assistant|>Recursively copy"
    )
    found, native = torch_logits(folder, tokens), native_logits(tmp_path / "again.gguf", tokens)
    assert np.abs(found - native).max() < 1e-3
    known, wanted = (
        read_header(place).metadata["tokenizer.ggml.tokens"]
        for place in (tmp_path / "again.gguf", path)
    )
    assert known == wanted


def test_other_models_are_refused(tmp_path, original):
    with pytest.raises(FileMissingError):
        folder_from_gguf(tmp_path / "none.gguf", tmp_path / "back")
    embeddings = PlannedTensor(
        "token_embd.weight", (8, 4), "F32", lambda: np.zeros((8, 4), np.float32)
    )
    write_gguf(tmp_path / "other.gguf", "qwen2", Metadata(), [embeddings])
    with pytest.raises(UnsupportedModelError, match="only llama can be read back"):
        folder_from_gguf(tmp_path / "other.gguf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("llama.feed_forward_length", "no single number as llama.feed_forward_length"),
        ("llama.attention.layer_norm_rms_epsilon", "no number as llama.*rms_epsilon"),
        ("token_embd.weight", "no tensor token_embd.weight$"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_filled_in(tmp_path, missing, problem):
    path = tmp_path / "m.gguf"
    write_random_llama(path, RandomLlama(width=64, ffn=96, layers=1, heads=4, kv_heads=2))
    renamed = f"{missing[:-1]}_".encode()
    path.write_bytes(path.read_bytes().replace(missing.encode(), renamed))
    with pytest.raises(ModelError, match=problem):
        folder_from_gguf(path, tmp_path / "back", tokenizer=False)
    assert not (tmp_path / "back").exists()
