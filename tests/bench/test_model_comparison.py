"""Perplexity, divergence and tensor errors against their definitions, computed another way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bench.model_comparison import (
    ComparisonOptions,
    compare_models,
    cut_into_chunks,
    row_divergence,
    summarise_rows,
    tensor_errors,
)
from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.errors import OptionError, PairError
from specrun.bindings.models import Model
from specrun.convert.gguf import Metadata, PlannedTensor, write_gguf
from specrun.convert.quantize import quantize_model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.tuning import scored_logits


def test_divergence_of_known_laws() -> None:
    p, q = (
        np.array([[0.5, 0.25, 0.25], [0.2, 0.8, 0.0]]),
        np.array([[0.25, 0.5, 0.25], [0.2, 0.8, 0.0]]),
    )
    with np.errstate(divide="ignore"):
        found = row_divergence(np.log(p) + 3.0, np.log(q) - 7.0, [0, 1])
    np.testing.assert_allclose(found.kl, [0.5 * np.log(2) - 0.25 * np.log(2), 0.0], atol=1e-15)
    np.testing.assert_allclose(found.original_nll, -np.log([0.5, 0.8]))
    np.testing.assert_allclose(found.other_nll, -np.log([0.25, 0.8]))
    assert found.same_top.tolist() == [False, True]
    summary = summarise_rows([found, found])
    assert summary.original.value == pytest.approx(1 / np.sqrt(0.5 * 0.8))
    assert (summary.n_tokens, summary.same_top) == (4, 0.5)
    assert summary.kl_mean == pytest.approx(np.log(2) / 8)
    assert summary.original.error == pytest.approx(
        summary.original.value * np.std(-np.log([0.5, 0.8] * 2), ddof=1) / 2
    )
    with pytest.raises(OptionError, match="too short"):
        summarise_rows([])


def test_a_token_that_the_other_model_never_says() -> None:
    with np.errstate(divide="ignore"):
        found = row_divergence(np.log([[0.5, 0.5]]), np.log([[1.0, 0.0]]), [1])
    assert found.kl[0] == np.inf
    assert summarise_rows([found]).other.value == np.inf


def test_chunks_as_llama_cpp_cuts_them() -> None:
    chunks = cut_into_chunks(range(100, 127), 8, bos=1)
    assert [chunk.tokens[:2] for chunk in chunks] == [(1, 101), (1, 109), (1, 117)]
    assert {(chunk.first, chunk.n_scored) for chunk in chunks} == {(4, 3)}
    assert cut_into_chunks(range(100, 127), 8, bos=None)[1].tokens == tuple(range(108, 116))
    assert [len(chunk.tokens) for chunk in cut_into_chunks(range(11), 512, bos=None)] == [11]
    with pytest.raises(OptionError, match="the text has 7 tokens"):
        cut_into_chunks(range(7), 512, bos=None)


@pytest.mark.parametrize("length", [16, 150])
def test_scored_logits_are_those_of_one_evaluation(tiny_model: Path, length: int) -> None:
    tokens = [(7 * i) % 250 for i in range(length)]
    with Model(tiny_model) as model:
        with Context(model, ContextOptions(**F32, n_outputs=length)) as context:
            batch = Batch(length, 1)
            batch.fill_chain(tokens, 0, [0], length)
            rows = context.decode(batch)
            whole = np.stack([rows.logits(row) for row in range(length)])
        settings = ContextOptions(**{**F32, "n_ctx": length}, n_batch=64, n_outputs=min(64, length))
        with Context(model, settings) as context:
            for _ in range(2):  # a second chunk sees nothing of the first
                blocks = np.concatenate(list(scored_logits(context, tokens, length // 2)))
    np.testing.assert_allclose(blocks, whole[length // 2 : length - 1], atol=1e-4)


def test_perplexity_of_a_model_is_its_own(tiny_model: Path, tiny_flat_twin: Path) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    found = compare_models(
        tiny_model, tiny_flat_twin, text, ComparisonOptions(n_ctx=64, n_chunks=2, n_threads=1)
    )
    swapped = compare_models(
        tiny_flat_twin, tiny_model, text, ComparisonOptions(n_ctx=64, n_chunks=2, n_threads=1)
    )
    assert (found.n_chunks, found.n_ctx, found.summary.n_tokens) == (2, 64, 62)
    assert found.summary.original.value == pytest.approx(swapped.summary.other.value)
    assert found.summary.kl_mean > 0.01
    assert found.summary.kl_mean != pytest.approx(swapped.summary.kl_mean)


def test_models_of_other_vocabularies_cannot_be_compared(
    tiny_model: Path, tiny_small_vocab: Path
) -> None:
    with pytest.raises(PairError, match="cannot be compared: "):
        compare_models(tiny_model, tiny_small_vocab, "text")


def test_options_are_checked() -> None:
    with pytest.raises(OptionError, match="n_ctx is 7"):
        ComparisonOptions(n_ctx=7)
    with pytest.raises(OptionError, match="n_chunks is -1"):
        ComparisonOptions(n_chunks=-1)


def test_errors_of_quantized_tensors(tmp_path: Path) -> None:
    write_random_llama(tmp_path / "a", RandomLlama(vocab_size=320, width=256, ffn=256, layers=1))
    means = {}
    for kind in ("F16", "Q8_0", "Q4_K_M", "Q2_K"):
        quantize_model(tmp_path / "a", tmp_path / kind, kind, n_threads=1, pure=True)
        errors = list(tensor_errors(tmp_path / "a", tmp_path / kind))
        assert len(errors) == 12
        means[kind] = np.mean([error.relative_rms for error in errors if "norm" not in error.name])
        assert all(error.relative_rms == 0 for error in errors if "norm" in error.name)
    assert list(means.values()) == sorted(means.values())
    # A uniform error of half a step at most: 1/sqrt(12) steps, of 127 up to the largest of 32
    # normal numbers (2.1 sd).
    assert means["Q8_0"] == pytest.approx(2.1 / 127 / 12**0.5, rel=0.15)


def test_tensors_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    def write(path: Path, **arrays: np.ndarray) -> None:
        kinds = {"float32": "F32", "int32": "I32"}
        tensors = [
            PlannedTensor(n, a.shape, kinds[a.dtype.name], lambda a=a: a) for n, a in arrays.items()
        ]
        write_gguf(path, "llama", Metadata(), tensors)

    two = np.array([[3.0, 4.0]], np.float32)
    write(tmp_path / "a", w=two, gone=two, wide=two, ids=np.array([1, 2], np.int32), zero=0 * two)
    changed = {
        "w": two + np.float32(0.5),
        "wide": np.ones((1, 3), np.float32),
        "ids": np.array([1, 2], np.int32),
    }
    write(tmp_path / "b", **changed, zero=0 * two, new=two)
    seen: list[int] = []
    found = {
        error.name: error
        for error in tensor_errors(
            tmp_path / "a", tmp_path / "b", lambda done, _all: seen.append(done)
        )
    }
    assert found["w"].relative_rms == pytest.approx(np.sqrt(0.5) / 5)
    assert (found["ids"].relative_rms, found["zero"].relative_rms) == (0, 0)
    assert (found["gone"].relative_rms, found["gone"].note) == (None, "only in the first file")
    assert found["wide"].note == "other shape: 1 x 2 and 1 x 3"
    assert found["new"].note == "only in the second file"
    assert seen[-1] == 10
