"""EAGLE-3's head on ggml equals a torch reference: real and drafted pairs, in batches, in trees,
quantized."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_dflash import token_matrices
from support.tiny_eagle3 import LLAMA3, YARN, TinyEagle3, Variant, random_eagle3
from support.tiny_models import CHAT

from specrun.bindings.errors import (
    MalformedFileError,
    PairError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.eagle import Eagle3Head, EagleRows, PairCells, check_head, is_head

HIDDEN, VOCAB, LAYERS = 32, 320, 6
TOKENS = [3, 1, 4, 1, 5, 9]
# A tree below three real pairs: 3 and 4 are siblings, 5 hangs below 3.
REAL = 3
PARENTS = [-1, 0, 1, 2, 2, 3]
POSITIONS = [0, 1, 2, 3, 3, 4]
RNG = np.random.default_rng(0)

VARIANTS = {
    "SafeAILab": Variant(),
    "speculators": Variant(changes={"norm_before_residual": True}, own_embedding=True),
    "norm_before_fc": Variant(norm_before_fc=True),
    "EAGLE-3.1": Variant(fc_norm=True, changes={"norm_output": True}),
    "llama3 rope": Variant(changes={"rope_scaling": LLAMA3}),
    "linear rope": Variant(changes={"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "one key-value head": Variant(n_kv_heads=1),
    "all tokens": Variant(draft_tokens=None),
    "DeepSpec": Variant(head_norms=True, draft_tokens=None, own_embedding=True),
    "three layers": Variant(n_layers=3, head_norms=True),
    "biases": Variant(biased=True, n_layers=2),
    "yarn": Variant(changes={"rope_scaling": YARN}),
}


@pytest.fixture
def target(tiny_deep_model: Path) -> Iterator[Model]:
    with Model(tiny_deep_model) as model:
        yield model


def ancestors() -> np.ndarray:
    sees = np.zeros((6, 6), bool)
    for node in range(6):
        above = node
        while above >= 0:
            sees[node, above] = True
            above = PARENTS[above]
    return sees


def features_of(head: TinyEagle3) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(REAL, 3 * head.target_hidden)).astype(np.float32)


def expected(head: TinyEagle3, path: Path, sees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """States and log-probabilities over the target's tokens, of real pairs and of those drafted
    below them."""
    embedding, output = (
        torch.tensor(matrix, dtype=torch.float64) for matrix in token_matrices(path)
    )
    w = head.tensors()
    embedded = w.get("embed_tokens.weight", embedding)[TOKENS]
    states = torch.zeros((6, head.hidden), dtype=torch.float64)
    states[:REAL] = head.fused(w, torch.tensor(features_of(head), dtype=torch.float64))
    for node in range(REAL, 6):  # what the parent fed back
        states[node] = head.predicted(w, embedded, states, POSITIONS, sees)[0][PARENTS[node]]
    fed_back, read = head.predicted(w, embedded, states, POSITIONS, sees)
    logits = read @ w.get("lm_head.weight", output).T
    log_probs = torch.full((6, VOCAB), -torch.inf, dtype=torch.float64)
    ids = head.target_ids
    log_probs[:, torch.arange(VOCAB) if ids is None else torch.tensor(ids)] = logits.log_softmax(-1)
    return fed_back.numpy(), log_probs.numpy()


def evaluated(
    pairs: PairCells, features: np.ndarray, pieces: list[slice], cells: list[int]
) -> EagleRows:
    """All rows in order; real pairs get the features, drafted ones what their parents fed back."""
    sees, found, logits = ancestors(), [], []
    states = np.zeros((6, HIDDEN), np.float32)
    for piece in pieces:
        nodes = list(range(6))[piece]
        by_cell = np.zeros((len(nodes), max(cells) + 1), bool)
        for row, node in enumerate(nodes):
            by_cell[row, [cells[above] for above in range(6) if sees[node, above]]] = True
        places = POSITIONS[piece], cells[piece], 0, by_cell
        if nodes[0] < REAL:
            rows = pairs.evaluate(TOKENS[piece], features[piece], places, real=True)
        else:
            rows = pairs.evaluate(TOKENS[piece], states[[PARENTS[node] for node in nodes]], places)
        states[piece] = rows.states
        found.append(rows)
        if rows.logits is not None:
            logits.append(rows.logits.copy())
    return EagleRows(
        states,
        np.concatenate([part.tokens for part in found]),
        np.concatenate([part.log_probs for part in found]),
        np.concatenate(logits) if logits else None,
    )


DEPTH_BY_DEPTH = (0, 3, 5, 6)
IN_ORDER, SCATTERED = [0, 1, 2, 3, 4, 5], [5, 0, 300, 2, 7, 3]


@pytest.mark.parametrize(
    ("variant", "bounds", "cells"),
    [
        *((name, DEPTH_BY_DEPTH, SCATTERED) for name in VARIANTS),
        ("SafeAILab", DEPTH_BY_DEPTH, IN_ORDER),
        ("SafeAILab", (0, 1, 2, 3, 4, 5, 6), SCATTERED),
        ("EAGLE-3.1", (0, 2, 3, 5, 6), SCATTERED),
    ],
)
def test_predictions_are_the_references(
    target: Model,
    tiny_deep_model: Path,
    tmp_path: Path,
    variant: str,
    bounds: tuple[int, ...],
    cells: list[int],
) -> None:
    reference = random_eagle3(HIDDEN, VOCAB, VARIANTS[variant])
    path = reference.write(tmp_path / "e.gguf", tiny_deep_model)
    head = Eagle3Head(path, target, ranks=VOCAB, whole_rows=True, n_threads=1)
    pairs = head.cells(400)
    assert head.taps == (1, 3, 5)
    rows = evaluated(
        pairs, features_of(reference), [slice(a, b) for a, b in itertools.pairwise(bounds)], cells
    )
    states, log_probs = expected(reference, tiny_deep_model, ancestors())
    np.testing.assert_allclose(rows.states, states, rtol=1e-4, atol=1e-4)
    ranked = np.take_along_axis(log_probs, rows.tokens.astype(np.intp), 1)
    np.testing.assert_allclose(rows.log_probs, ranked, rtol=1e-4, atol=1e-4)
    assert (np.diff(rows.log_probs, axis=1) <= 0).all()
    n_draft = VARIANTS[variant].draft_tokens or VOCAB
    assert rows.tokens.shape == (6, n_draft)
    assert rows.logits is not None
    assert rows.logits.shape == (6, VOCAB)
    # A token outside the draft vocabulary has no probability, and the others share all of it.
    with np.errstate(divide="ignore"):
        whole = rows.logits - np.log(np.exp(rows.logits).sum(1, keepdims=True))
    np.testing.assert_allclose(np.exp(whole), np.exp(log_probs), rtol=1e-3, atol=1e-6)
    assert ((rows.logits == -np.inf) == (log_probs == -np.inf)).all()
    pairs.close()
    pairs.close()
    head.close()
    head.close()


def other(name: str) -> TinyEagle3:
    """A head that computes something else with the same numbers, as mistakes would."""
    head = random_eagle3(HIDDEN, VOCAB, VARIANTS["llama3 rope"])
    w = dict(head.weights)
    changes: dict[str, Any] = {}
    if name == "norms exchanged":
        a, b = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
        w[a], w[b] = w[b], w[a]
    elif name == "embedding after the state":
        for part in "qkv":
            key = f"midlayer.self_attn.{part}_proj.weight"
            w[key] = np.roll(w[key], HIDDEN, 1)
    elif name == "normed residual":
        changes = {"norm_before_residual": True}
    elif name == "no rope scaling":
        changes = {"rope_scaling": None}
    elif name == "taps in another order":
        w["fc.weight"] = np.roll(w["fc.weight"], HIDDEN, 1)
    elif name == "normed state fed back":
        changes = {"norm_output": True}
    return TinyEagle3(w, rope_scaling=changes.pop("rope_scaling", LLAMA3), **changes)


@pytest.mark.parametrize(
    "mistake",
    ["norms exchanged", "embedding after the state", "normed residual", "no rope scaling",
    "taps in another order",
     "normed state fed back"],
)  # fmt: skip
def test_mistakes_would_be_seen(tiny_deep_model: Path, mistake: str) -> None:
    right = expected(
        random_eagle3(HIDDEN, VOCAB, VARIANTS["llama3 rope"]), tiny_deep_model, ancestors()
    )[0]
    wrong = expected(other(mistake), tiny_deep_model, ancestors())[0]
    assert np.abs(right - wrong)[-1].max() > 1e-3


def test_a_narrower_target_may_have_a_wider_head(tmp_path: Path, tiny_folder: Path) -> None:
    """As for Llama 3.3 70B: the head's states are of another size, and it has embeddings of its
    own."""
    path = tiny_folder / "narrow.gguf"
    if not path.exists():
        write_random_llama(path, RandomLlama(**{**CHAT, "layers": LAYERS, "width": 16}))
    reference = random_eagle3(HIDDEN, VOCAB, Variant(own_embedding=True, target_hidden=16))
    with Model(path) as target:
        file = reference.write(tmp_path / "e.gguf", path)
        head = Eagle3Head(file, target, ranks=3, n_threads=1)
        pairs = head.cells(16)
        rows = evaluated(
            pairs,
            features_of(reference),
            [slice(0, 3), slice(3, 5), slice(5, 6)],
            [0, 1, 2, 3, 4, 5],
        )
        np.testing.assert_allclose(
            rows.states, expected(reference, path, ancestors())[0], rtol=1e-4, atol=1e-4
        )
        pairs.close()
        head.close()
        borrowing = random_eagle3(HIDDEN, VOCAB, Variant(target_hidden=16)).write(
            tmp_path / "b.gguf", path
        )
        with pytest.raises(
            PairError, match=r"no token_embd\.weight, and the target's is for states of 16 numbers"
        ):
            Eagle3Head(borrowing, target, ranks=3, n_threads=1)


IDS = np.arange(48, dtype=np.int64)
FAULTS: list[tuple[dict[str, Any], type[SpecrunError], str]] = [
    ({"architecture": "eagle"}, UnsupportedModelError, "architecture eagle, and eagle3"),
    ({"target_hidden_size": 64}, PairError, "states of 64 numbers, and the target's have 32"),
    ({"attention.head_count": 3}, MalformedFileError, "3 heads and 2 key-value heads"),
    ({"feed_forward_length": 65}, MalformedFileError, r"ffn_gate.weight of shape \[32, 64\]"),
    (
        {"without": "blk.0.attn_norm_2.weight"},
        MalformedFileError,
        "no tensor blk.0.attn_norm_2.weight",
    ),
    ({"without": "d2t"}, MalformedFileError, "predicts 48 tokens of the target's 320"),
    ({"without": "fc.weight"}, MalformedFileError, "no tensor fc.weight"),
    ({"taps": (1, 3, 6)}, PairError, "input of layer 6, and the target has 6 layers"),
    ({"scaling": "longrope"}, UnsupportedModelError, "scales its positions by 'longrope'"),
    ({"block_count": 2}, MalformedFileError, r"no tensor blk\.1\.attn_norm\.weight"),
    ({"taps": (1, 3, -1)}, MalformedFileError, "does not name the layers"),
    ({"taps": ()}, MalformedFileError, "does not name the layers"),
    ({"taps": (1, 3)}, MalformedFileError, r"fc.weight of shape \[96, 32\].*\[64, 32\]"),
    ({"d2t": np.where(IDS == 7, 320, IDS)}, PairError, "names token 320, and the target has 320"),
    ({"d2t": np.where(IDS == 7, -1, IDS)}, PairError, "names token -1"),
    ({"d2t": np.where(IDS == 7, 9, IDS)}, MalformedFileError, "token 9 twice"),
    ({"d2t": IDS.astype(np.float32)}, MalformedFileError, r"\(d2t\) in F32, not in I64"),
]


@pytest.mark.parametrize(("changes", "kind", "problem"), FAULTS)
def test_heads_that_do_not_fit_are_refused(
    target: Model,
    tiny_deep_model: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    path = random_eagle3(HIDDEN, VOCAB).write(tmp_path / "e.gguf", tiny_deep_model, **changes)
    with pytest.raises(kind, match=problem):
        Eagle3Head(path, target, ranks=3, n_threads=1)
    if "architecture" not in changes:
        with pytest.raises(kind, match=problem):
            check_head(path, target)


def test_a_head_that_fits_passes_the_check(
    target: Model, tiny_deep_model: Path, tmp_path: Path
) -> None:
    for name in ("SafeAILab", "all tokens"):
        path = random_eagle3(HIDDEN, VOCAB, VARIANTS[name]).write(
            tmp_path / f"{name}.gguf", tiny_deep_model
        )
        assert is_head(path)
        check_head(path, target)
    assert not is_head(tiny_deep_model)


def test_heads_for_other_vocabularies_are_refused(
    target: Model, tiny_folder: Path, tmp_path: Path
) -> None:
    for name, spec in {
        "fewer": RandomLlama(vocab_size=300),
        "other": RandomLlama(
            vocab_size=320, controls=tuple(f"<|{i}|>" for i in range(200)), eos="<|0|>"
        ),
    }.items():
        source = tmp_path / f"{name}.gguf"
        write_random_llama(source, spec)
        path = random_eagle3(HIDDEN, VOCAB).write(tmp_path / f"{name} head.gguf", source)
        with pytest.raises(
            PairError, match=r"300 tokens|of its tokens are others, the first one token"
        ):
            Eagle3Head(path, target, ranks=3, n_threads=1)
