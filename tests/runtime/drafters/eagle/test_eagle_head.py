"""EAGLE's head on ggml equals a reference: in batches, one by one, below other pairs, quantized."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from support.tiny_dflash import token_matrices
from support.tiny_eagle import TinyEagle, random_eagle

from specrun.bindings.errors import (
    MalformedFileError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle import EagleHead, EagleRows, PairCells

HIDDEN, VOCAB = 32, 320
RNG = np.random.default_rng(0)
TOKENS = [3, 1, 4, 1, 5, 9]
STATES = RNG.normal(size=(6, HIDDEN)).astype(np.float32)
# A tree below two real pairs: 2 and 3 are siblings, 4 and 5 hang below 2.
PARENTS = [-1, 0, 1, 1, 2, 2]
POSITIONS = [0, 1, 2, 2, 3, 3]


def ancestors() -> np.ndarray:
    sees = np.zeros((6, 6), bool)
    for node in range(6):
        above = node
        while above >= 0:
            sees[node, above] = True
            above = PARENTS[above]
    return sees


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        yield model


def expected(head: TinyEagle, path: Path, sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    embedding, output = token_matrices(path)
    states = head.states(embedding[TOKENS], STATES, POSITIONS, sees)
    logits = states @ output.T
    return states, logits - np.log(np.exp(logits).sum(1, keepdims=True))


def evaluated(
    pairs: PairCells, pieces: list[slice], cells: list[int], sees: np.ndarray
) -> list[EagleRows]:
    found = []
    for piece in pieces:
        by_cell = np.zeros((len(TOKENS[piece]), max(cells) + 1), bool)
        for row, node in enumerate(range(6)[piece]):
            by_cell[row, [cells[above] for above in range(6) if sees[node, above]]] = True
        places = POSITIONS[piece], cells[piece], 0, by_cell
        rows = pairs.evaluate(TOKENS[piece], STATES[piece], places)
        found.append(
            dataclasses.replace(rows, logits=None if rows.logits is None else rows.logits.copy())
        )
    return found


@pytest.mark.parametrize(
    ("bias", "kv_heads", "bounds", "cells"),
    [
        (True, 4, (0, 6), [0, 1, 2, 3, 4, 5]),
        (False, 2, (0, 2, 4, 6), [5, 0, 300, 2, 7, 3]),
        (True, 1, (0, 2, 6), [5, 0, 300, 2, 7, 3]),
        (False, 2, (0, 1, 2, 3, 4, 5, 6), [5, 0, 300, 2, 7, 3]),
    ],
)
def test_predictions_are_the_references(
    target: Model,
    tiny_model: Path,
    tmp_path: Path,
    bias: bool,
    kv_heads: int,
    bounds: tuple[int, ...],
    cells: list[int],
) -> None:
    """In one batch, depth by depth and one by one, wherever the pairs lie in the cache."""
    reference = random_eagle(HIDDEN, n_kv_heads=kv_heads, bias=bias)
    path = reference.write(tmp_path / "e.gguf", VOCAB)
    head = EagleHead(path, target, ranks=VOCAB, whole_rows=True, n_threads=1)
    pairs = head.cells(400)
    sees = ancestors()
    rows = evaluated(pairs, [slice(a, b) for a, b in itertools.pairwise(bounds)], cells, sees)
    states, log_probs = expected(reference, tiny_model, sees)
    np.testing.assert_allclose(
        np.concatenate([row.states for row in rows]), states, rtol=1e-4, atol=1e-4
    )
    tokens = np.concatenate([row.tokens for row in rows])
    found = np.concatenate([row.log_probs for row in rows])
    np.testing.assert_allclose(
        found, np.take_along_axis(log_probs, tokens.astype(np.intp), 1), rtol=1e-4, atol=1e-4
    )
    assert (np.diff(found, axis=1) <= 0).all()
    logits = np.concatenate([row.logits for row in rows if row.logits is not None])
    np.testing.assert_allclose(
        logits - logits.max(1, keepdims=True),
        log_probs - log_probs.max(1, keepdims=True),
        atol=2e-4,
    )
    pairs.close()
    pairs.close()
    head.close()
    head.close()


@pytest.mark.parametrize(("quantization", "allowed"), [("F16", 0.01), ("Q8_0", 0.1), ("Q4_0", 1.0)])
def test_quantized_heads_stay_near(
    target: Model, tiny_model: Path, tmp_path: Path, quantization: str, allowed: float
) -> None:
    reference = random_eagle(HIDDEN)
    path = reference.write(tmp_path / "e.gguf", VOCAB, quantization=quantization)
    head = EagleHead(path, target, ranks=3, n_threads=1)
    pairs = head.cells(16)
    (rows,) = evaluated(pairs, [slice(0, 6)], [0, 1, 2, 3, 4, 5], ancestors())
    states, _ = expected(reference, tiny_model, ancestors())
    assert rows.logits is None
    assert rows.tokens.shape == (6, 3)
    assert 0.0 < np.sqrt(((rows.states - states) ** 2).mean()) < allowed
    pairs.close()
    head.close()


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"architecture": "medusa"}, UnsupportedModelError, "architecture medusa"),
        ({"embedding_length": 64}, PairError, "64 numbers"),
        ({"vocab_size": 300}, PairError, "300 tokens"),
        ({"attention.head_count": 5}, MalformedFileError, "5 heads"),
        ({"feed_forward_length": 65}, MalformedFileError, r"ffn_gate.weight of shape \[32, 64\]"),
        ({"without": "attn_k.weight"}, MalformedFileError, "no tensor eagle.attn_k.weight"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    target: Model,
    tmp_path: Path,
    changes: dict[str, object],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    path = random_eagle(HIDDEN).write(tmp_path / "e.gguf", VOCAB, **changes)
    with pytest.raises(kind, match=problem):
        EagleHead(path, target, ranks=3, n_threads=1)
