"""Bytes that evaluations read: by hand, from files, and what follows for long texts and experts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.gguf import read_header
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.planning import (
    MemoryTraffic,
    bytes_per_position,
    expected_experts,
    memory_traffic,
    mixture,
)
from specrun.runtime.planning.theory import bytes_ratio, multiplications


def test_bytes_of_a_round_by_hand() -> None:
    target, draft = MemoryTraffic(1000.0, 2.0), MemoryTraffic(100.0, 0.5)
    # Two drafts with a = 1/2: E = 1.75; T(3) = 1000 + 2 * 40, D(1) = 100 + 0.5 * 40.
    ratio = bytes_ratio(target, draft, 0.5, 2, n_context=40)
    assert ratio == pytest.approx(1320 / 1.75 / 1080)
    assert bytes_ratio(target, draft, 0.7, 0, n_context=9) == 1.0


@pytest.mark.parametrize(
    ("weights", "acceptance", "pays_from"),
    [(13.2e9, 0.8, 6800), (4.0e9, 0.9, 1300)],
)
def test_a_bounded_cache_pays_from_where_the_page_says(
    weights: float, acceptance: float, pays_from: int
) -> None:
    target = MemoryTraffic(weights, 512 * 1024)

    def best(n_context: int) -> float:
        bounded = MemoryTraffic(target.evaluation(1, min(388, n_context)), 0.0)
        return min(
            bytes_ratio(target, bounded, acceptance, n, n_context=n_context) for n in range(1, 9)
        )

    assert best(pays_from) < 1.0 <= best(pays_from - 100)
    page = (Path(__file__).parents[3] / "docs" / "bounded-cache.md").read_text()
    assert f"| {acceptance} | {pays_from:,} |" in page
    assert f"{1 / best(32_000):.2f} | {1 / best(128_000):.2f} |" in page


# -- experts ---------------------------------------------------------------------------------------


def test_expected_experts_are_those_of_independent_choices() -> None:
    """Against drawing k of E without replacement for each token, 40,000 times: 4 sigma."""
    rng = np.random.default_rng(0)
    for n_experts, n_used, n_tokens in ((8, 2, 1), (8, 2, 4), (16, 4, 3), (6, 6, 2), (5, 0, 3)):
        draws = rng.random((40_000, n_tokens, n_experts)).argsort(axis=2) < n_used
        read = draws.any(axis=1).sum(axis=1)
        wanted = expected_experts(n_experts, n_used, n_tokens)
        error = 4 * float(read.std()) / math.sqrt(len(read)) + 1e-12
        assert float(read.mean()) == pytest.approx(wanted, abs=error)
    assert expected_experts(8, 2, 1) == 2
    assert expected_experts(8, 2, 0) == 0


def test_mixtures_read_more_weights_for_more_tokens() -> None:
    traffic = MemoryTraffic(100.0, 0.0, experts=800.0, n_experts=8, n_used=2)
    assert traffic.weights(1) == pytest.approx(300.0)
    assert traffic.weights(4) == pytest.approx(100 + 800 * (1 - 0.75**4))
    assert MemoryTraffic(100.0, 0.0).weights(64) == 100.0


# -- files -----------------------------------------------------------------------------------------


def test_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_llama(path, RandomLlama(vocab_size=320, scale=2.0))
    header = read_header(path)
    layers, width = header.metadata["llama.block_count"], header.metadata["llama.embedding_length"]
    assert isinstance(layers, int)
    assert isinstance(width, int)
    groups = header.metadata["llama.attention.head_count_kv"]
    heads = header.metadata["llama.attention.head_count"]
    assert isinstance(groups, int)
    assert isinstance(heads, int)
    one = layers * width * groups // heads
    assert bytes_per_position(header) == one * 2 * 2  # keys and values in F16
    options = ContextOptions(cache_type_k="q8_0", cache_type_v="f32")
    assert bytes_per_position(header, options) == one * (34 / 32 + 4)
    with Model(path) as model:
        traffic = memory_traffic(model)
        embeddings = next(t.n_bytes for t in header.tensors if t.name == "token_embd.weight")
        assert traffic == MemoryTraffic(model.n_bytes - embeddings, one * 4)
    assert mixture(header) == (0, 0)


def test_multiplications_are_the_elements_of_matrices(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_llama(path, RandomLlama(vocab_size=320, scale=2.0))
    wanted = 0
    for tensor in read_header(path).tensors:
        if len(tensor.shape) == 2 and tensor.name != "token_embd.weight":
            wanted += tensor.shape[0] * tensor.shape[1]
    with Model(path) as model:
        assert multiplications(model) == wanted < model.n_params
    tied = tmp_path / "tied.gguf"
    write_random_llama(tied, RandomLlama(vocab_size=320, scale=2.0, tied=True))
    with Model(tied) as model:
        assert multiplications(model) == wanted


def test_damaged_files_cost_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_llama(path, RandomLlama(vocab_size=320, scale=2.0))
    header = read_header(path)
    for changes in (
        {"llama.block_count": 2**40},
        {"llama.attention.head_count": 0},
        {"llama.embedding_length": "wide"},
        {"llama.expert_count": 8, "llama.expert_used_count": -3},
    ):
        damaged = dataclasses.replace(header, metadata={**header.metadata, **changes})
        assert bytes_per_position(damaged) >= 0.0
        n_experts, n_used = mixture(damaged)
        assert 0 <= n_used <= n_experts
