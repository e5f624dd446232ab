"""Batches of embeddings: the bits of tokens, in every family; refusals of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support import tiny_families
from support.renamed_models import as_architecture
from support.tiny_families import FAMILIES, SENTENCEPIECE, Family
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import (
    EMBEDDING_INPUT_ARCHITECTURES,
    Batch,
    Context,
    ContextOptions,
    EmbeddingBatch,
    EmbeddingInputs,
)
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.gguf import read_header
from specrun.bindings.models import Model
from specrun.convert import convert_checkpoint
from specrun.convert.random_model import RandomLlama, write_random_llama

TOKENS = [5, 260, 7, 8, 9, 31, 7]
N = len(TOKENS)
ONE_OF_EACH = [*{family.architecture: family for family in FAMILIES}.values()]
# llama.cpp reads more of their tokens than embeddings, or computes in another order.
REFUSED = {
    "gemma4 experts": "gemma4",
    "qwen3.5": "qwen35",
    "qwen3.5 moe": "qwen35moe",
    "glm4": "glm4",
    "glm4 moe": "glm4moe",
}
READ = [family for family in ONE_OF_EACH if family.name not in REFUSED]


@pytest.fixture
def model(tiny_model: Path) -> Iterator[Model]:
    with Model(tiny_model) as opened:
        yield opened


def both_ways(model: Model, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """The logits of TOKENS from a batch of tokens, and of the same embeddings times `factor`."""
    extra = np.zeros((1, model.n_embd), np.float32)
    with (
        Context(model, ContextOptions(**F32, n_outputs=N)) as context,
        closing(EmbeddingInputs(model, extra)) as inputs,
    ):
        batch = Batch(N, 1)
        batch.fill_chain(TOKENS, 0, (0,), N)
        rows = context.decode(batch)
        wanted = np.stack([rows.logits(row) for row in range(N)])
        context.memory.clear()
        embedded = EmbeddingBatch(N, 1, model.n_embd)
        embedded.fill_chain([0] * N, 0, (0,), N)
        embedded.give(inputs.rows(TOKENS) * np.float32(factor))
        rows = context.decode(embedded)
        return wanted, np.stack([rows.logits(row) for row in range(N)])


def test_every_family_is_read_or_refused() -> None:
    assert EMBEDDING_INPUT_ARCHITECTURES.isdisjoint(REFUSED.values())
    assert set(REFUSED).issubset(family.name for family in ONE_OF_EACH)


@pytest.mark.parametrize("family", READ, ids=lambda family: family.name)
def test_embeddings_give_the_bits_of_their_tokens(family: Family, tmp_path: Path) -> None:
    made = tiny_families.build(family, tmp_path / "folder")
    path = tmp_path / "model.gguf"
    pre = None if family.tokenizer in SENTENCEPIECE else family.tokenizer
    convert_checkpoint(made.folder, path, outtype="f32", pre=pre)
    assert read_header(path).architecture in EMBEDDING_INPUT_ARCHITECTURES
    with Model(path) as model:
        wanted, found = both_ways(model)
        assert np.array_equal(found, wanted)
        assert not np.array_equal(both_ways(model, 1.01)[1], wanted)  # the comparison can fail


@pytest.mark.parametrize("type_name", ["Q8_0", "F16"])
def test_quantized_rows_are_dequantized_as_llama_cpp_does(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "file_type": type_name}))
    with Model(path) as model:
        wanted, found = both_ways(model)
    assert np.array_equal(found, wanted)


def test_ids_beyond_the_vocabulary_name_the_extra_rows(model: Model) -> None:
    extra = np.arange(2 * model.n_embd, dtype=np.float32).reshape(2, -1)
    first = model.vocabulary.size
    with closing(EmbeddingInputs(model, extra)) as inputs:
        assert not inputs.takes([0, first - 1])
        assert inputs.takes([0, first])
        found = inputs.rows([first + 1, 3, first, 3])
        assert np.array_equal(found[[0, 2]], extra[[1, 0]])
        assert np.array_equal(found[1], found[3])
        # More than are looked up at once, and in another order.
        many = [*range(40, 0, -1)]
        assert np.array_equal(inputs.rows(many)[37], found[1])
        for wrong in (first + 2, -1):
            with pytest.raises(OptionError, match="names none of the 320 tokens and 2 look-ahead"):
                inputs.rows([wrong])


def test_what_does_not_fit_is_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="for a model whose tokens have 32 numbers each"):
        EmbeddingInputs(model, np.zeros((1, 31), np.float32))
    batch = EmbeddingBatch(2, 1, model.n_embd)
    batch.fill_chain([0, 0], 0, (0,), 1)
    with pytest.raises(OptionError, match="in a batch of 2 by 32"):
        batch.give(np.zeros((1, model.n_embd), np.float32))
    path = as_architecture(Path(model.path), tmp_path / "other.gguf", "xverse")
    with (
        Model(path) as other,
        pytest.raises(UnsupportedModelError, match="positions of xverse models cannot be eval"),
    ):
        EmbeddingInputs(other, np.zeros((1, 32), np.float32))
