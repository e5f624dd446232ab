"""Hydra's heads and prefix layer on ggml equal a torch reference: in batches, one by one,
quantized."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.errors import (
    MalformedFileError,
    OptionError,
    SpecrunError,
    UnsupportedModelError,
)
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.hydra import HydraHead, PrefixCells

torch = pytest.importorskip("torch")
from support.tiny_dflash import token_matrices  # noqa: E402
from support.tiny_hydra import TinyHydra, log_probs, random_hydra  # noqa: E402

HIDDEN, VOCAB = 32, 320
RNG = np.random.default_rng(0)
STATE = RNG.normal(size=HIDDEN).astype(np.float32)
STATES = RNG.normal(size=(600, HIDDEN)).astype(np.float32)
# The paths of a tree, depth by depth: the target's own token 7, then 2, 3 and 5 paths below it.
PATHS = [
    [[7]],
    [[7, 3], [7, 9]],
    [[7, 3, 1], [7, 3, 200], [7, 9, 1]],
]


@pytest.fixture
def target(tiny_model: Path):
    with Model(tiny_model) as model:
        yield model


@pytest.fixture(scope="module")
def matrices(tiny_model: Path) -> tuple[np.ndarray, np.ndarray]:
    """The target's embedding and output matrices."""
    return token_matrices(tiny_model)


def opened(
    reference: TinyHydra, path: Path, target: Model, ranks: int = VOCAB, **changes: object
) -> HydraHead:
    reference.write(path, VOCAB, **changes)
    return HydraHead(path, target, ranks=[ranks] * reference.heads, n_threads=1)


def by_token(head: HydraHead, state: np.ndarray, paths: list[list[int]]) -> np.ndarray:
    """All log-probabilities [n, vocab], in the order of the tokens."""
    best = head.best_laws(state, paths)
    assert (np.diff(best.log_probs, axis=1) <= 0).all()
    found = np.full(best.tokens.shape, np.nan)
    np.put_along_axis(found, best.tokens.astype(np.intp), best.log_probs, 1)
    return found


# -- heads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grounded", [True, False])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("own_output", [True, False])
def test_predictions_are_the_references(
    target: Model,
    matrices: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    grounded: bool,
    blocks: int,
    own_output: bool,
) -> None:
    """All paths of a depth at once, and one by one."""
    reference = random_hydra(HIDDEN, VOCAB, blocks=blocks, grounded=grounded, own_output=own_output)
    head = opened(reference, tmp_path / "h.gguf", target)
    for paths in PATHS:
        expected = log_probs(reference, STATE, paths, *matrices)
        np.testing.assert_allclose(by_token(head, STATE, paths), expected, rtol=1e-4, atol=1e-4)
        alone = np.concatenate([by_token(head, STATE, [path]) for path in paths])
        np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-4)
    many = RNG.integers(0, VOCAB, (70, 3)).tolist()  # more than the widest of the fixed sizes
    np.testing.assert_allclose(
        by_token(head, STATE, many),
        log_probs(reference, STATE, many, *matrices),
        rtol=1e-4,
        atol=1e-4,
    )
    assert head.native_seconds > 0.0
    head.close()
    head.close()


def test_every_token_of_the_path_matters(
    target: Model, matrices: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """The control: another token anywhere on the path, or two of them swapped, moves the law far
    beyond rounding."""
    reference = random_hydra(HIDDEN, VOCAB)
    head = opened(reference, tmp_path / "h.gguf", target)
    right, *others = by_token(head, STATE, [[7, 3, 1], [8, 3, 1], [7, 4, 1], [7, 3, 2], [3, 7, 1]])
    for other in others:
        assert np.abs(other - right).max() > 0.05
    assert np.abs(by_token(head, STATES[0], [[7, 3, 1]])[0] - right).max() > 0.05
    head.close()


def test_fewer_ranks_are_the_best_ones(target: Model, tmp_path: Path) -> None:
    reference = random_hydra(HIDDEN, VOCAB)
    whole = opened(reference, tmp_path / "h.gguf", target)
    few = HydraHead(tmp_path / "h.gguf", target, n_threads=1)
    few.prepare([5, 2])
    for paths, count in zip(PATHS[:2], (5, 2), strict=True):
        every, best = whole.best_laws(STATE, paths), few.best_laws(STATE, paths)
        np.testing.assert_array_equal(best.tokens, every.tokens[:, :count])
        np.testing.assert_array_equal(few.best_laws(STATE, paths).tokens, best.tokens)
        np.testing.assert_allclose(best.log_probs, every.log_probs[:, :count], atol=1e-6)
    with pytest.raises(OptionError, match="prepared for 2"):
        few.best_laws(STATE, PATHS[2])
    with pytest.raises(OptionError, match="outside the 320 tokens"):
        few.best_laws(STATE, [[7, 3], [7, 320]])
    with pytest.raises(OptionError, match="reach 1 to 3 tokens"):
        few.prepare([1, 1, 1, 1])
    whole.close()
    few.close()


# -- the prefix layer ------------------------------------------------------------------------------


def layer_of(head: HydraHead) -> closing[PrefixCells]:
    """A conversation's room in the layer, closed at the end of a `with` block."""
    assert head.prefix is not None
    return closing(PrefixCells(head, head.prefix, 600))


def prefix_reference(
    reference: TinyHydra, n: int, first: int = 0, position: int | None = None
) -> np.ndarray:
    states = torch.tensor(STATES[first : first + n], dtype=torch.float64)
    return reference.double().prefix_states(states, first if position is None else position).numpy()


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_kv_heads": 4},
        {"n_kv_heads": 1, "rope_base": 500.0, "eps": 1e-3},
        {"rope_factor": 4.0},
        {"rope_divisors": (1.0, 1.5, 4.0, 8.0)},
    ],
)
@pytest.mark.parametrize(
    "bounds", [(0, 40), (0, 1, 2, 3, 40), (0, 7, 40), (0, 250, 251, 253, 259, 600)]
)
def test_the_prefix_layer_is_the_references(
    target: Model, tmp_path: Path, sizes: dict[str, float], bounds: tuple[int, ...]
) -> None:
    """In one piece and in several, and where the text outgrows the cells that a graph reads."""
    reference = random_hydra(HIDDEN, VOCAB, prefix=True, **sizes)
    head = opened(reference, tmp_path / "h.gguf", target)
    with layer_of(head) as layer:
        found = [layer.evaluate(STATES[a:b], a, a) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_allclose(
        np.concatenate(found), prefix_reference(reference, bounds[-1]), rtol=1e-4, atol=1e-4
    )
    head.close()


def test_a_rejected_or_forgotten_text_leaves_no_trace(target: Model, tmp_path: Path) -> None:
    """Cells are written over: what another text left in them, behind or below, does not show."""
    reference = random_hydra(HIDDEN, VOCAB, prefix=True)
    head = opened(reference, tmp_path / "h.gguf", target)
    with layer_of(head) as layer:
        layer.evaluate(STATES[300:340], 0, 0)
        found = [layer.evaluate(STATES[:9], 0, 0), layer.evaluate(STATES[9:11], 9, 9)]
        layer.evaluate(STATES[400:404], 11, 11)
        found.append(layer.evaluate(STATES[11:12], 11, 11))
        expected = prefix_reference(reference, 12)
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-4)
        # A text whose beginning is unknown stands at its true positions; they are relative, so only
        # the order counts.
        late = layer.evaluate(STATES[5:12], 5, 0)
    np.testing.assert_allclose(late, prefix_reference(reference, 7, 5), rtol=1e-4, atol=1e-4)
    assert np.abs(late[-1] - expected[-1]).max() > 0.01  # the control: what was not seen is missed
    head.close()


def test_positions_matter(target: Model, tmp_path: Path) -> None:
    """The control for rotary positions: a gap between two pieces shows."""
    reference = random_hydra(HIDDEN, VOCAB, prefix=True)
    head = opened(reference, tmp_path / "h.gguf", target)
    with layer_of(head) as layer:
        layer.evaluate(STATES[:9], 0, 0)
        shifted = layer.evaluate(STATES[9:10], 12, 9)
        assert np.abs(shifted[0] - prefix_reference(reference, 10)[-1]).max() > 1e-3
        with pytest.raises(OptionError, match="768 cells cannot hold 769"):
            layer.evaluate(STATES[:1], 768, 768)
    head.close()


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "problem"),
    [
        ({"architecture": "medusa"}, UnsupportedModelError, "architecture medusa"),
        ({"head_count": 4}, MalformedFileError, "no tensor hydra.3.res.0.weight"),
        ({"head_count": None}, MalformedFileError, "None as hydra.head_count"),
        ({"head_count": 33}, MalformedFileError, "33 as hydra.head_count"),
        ({"block_count": 3}, MalformedFileError, "no tensor hydra.0.res.2.weight"),
        ({"without": "hydra.1.res.0.bias"}, MalformedFileError, "no tensor hydra.1.res.0.bias"),
        ({"without": "hydra.2.skip.weight"}, MalformedFileError, "no tensor hydra.2.skip.weight"),
        ({"grounded": False}, MalformedFileError, r"hydra.0.res.0.weight of shape \[64, 32\]"),
        (
            {"replaced": {"hydra.1.output.weight": np.zeros((300, HIDDEN), np.float32)}},
            MalformedFileError,
            r"hydra.1.output.weight of shape \[32, 300\]",
        ),
        (
            {"without": "hydra.prefix.attn_k.weight"},
            MalformedFileError,
            "no tensor hydra.prefix.attn_k.weight",
        ),
        (
            {"without": "hydra.prefix.output_norm.weight"},
            MalformedFileError,
            "no tensor hydra.prefix.output_norm",
        ),
        ({"attention.head_count": 5}, MalformedFileError, "5 heads"),
        ({"attention.head_count_kv": 4}, MalformedFileError, r"attn_k.weight of shape \[32, 16\]"),
        ({"feed_forward_length": 65}, MalformedFileError, r"ffn_gate.weight of shape \[32, 64\]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    target: Model,
    tmp_path: Path,
    changes: dict[str, object],
    kind: type[SpecrunError],
    problem: str,
) -> None:
    with pytest.raises(kind, match=problem):
        opened(
            random_hydra(HIDDEN, VOCAB, blocks=2, prefix=True),
            tmp_path / "h.gguf",
            target,
            **changes,
        )
