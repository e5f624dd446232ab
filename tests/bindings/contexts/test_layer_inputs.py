"""Layer inputs: the right numbers for every token of any batch, and no question that would end the
process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from support.renamed_models import as_architecture, qwen3_norms
from support.tiny_models import CHAT, F32
from support.tiny_nextn import write_tiny_qwen35

from specrun.bindings.contexts import (
    LAYER_INPUT_ARCHITECTURES,
    Batch,
    Context,
    ContextOptions,
    check_layer_inputs,
)
from specrun.bindings.contexts import rows as rows_module
from specrun.bindings.errors import OptionError, StaleViewError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama

LAYERS, WIDTH, EPS = 6, 32, 1e-5
TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
WITHOUT = "xverse"
"""An architecture with a Llama's tensors, whose graph hands out no layer inputs."""


@pytest.fixture
def model(tiny_deep_model: Path) -> Iterator[Model]:
    with Model(tiny_deep_model) as opened:
        yield opened


@pytest.fixture(scope="module")
def renamed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("renamed")
    return {
        "llama": tiny_model,
        "qwen35": write_tiny_qwen35(folder / "qwen35.gguf"),
        "qwen3": as_architecture(tiny_model, folder / "qwen3.gguf", "qwen3", qwen3_norms(2, 8)),
        WITHOUT: as_architecture(tiny_model, folder / "without.gguf", WITHOUT),
    }


def normed_states(folder: Path, layers: int, text: list[int]) -> np.ndarray:
    """Final hidden states of the same model with its first layers only: tensors are seeded by their
    names."""
    path = folder / f"first {layers}.gguf"
    if not path.exists():
        write_random_llama(path, RandomLlama(**{**CHAT, "layers": layers}))
    options = ContextOptions(**F32, n_outputs=len(text), hidden_states=True)
    with Model(path) as model, Context(model, options) as context:
        batch = Batch(len(text), 1)
        batch.fill_chain(text, 0, [0], len(text))
        rows = context.decode(batch)
        return rows.hidden_states(range(len(text)))


def normed(states: np.ndarray, path: Path) -> np.ndarray:
    weight = next(
        tensor.data for tensor in GGUFReader(path).tensors if tensor.name == "output_norm.weight"
    )
    return states / np.sqrt((states**2).mean(-1, keepdims=True) + EPS) * weight


def evaluated(
    model: Model, layers: tuple[int, ...], pieces: int, **options: int
) -> dict[int, np.ndarray]:
    """The inputs of layers at every token of TEXT, read in so many evaluations without output
    rows."""
    found: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}
    with Context(
        model, ContextOptions(**{**F32, **options}, n_outputs=1, layer_inputs=layers)
    ) as context:
        batch = Batch(len(TEXT), 1)
        for piece in np.array_split(np.arange(len(TEXT)), pieces):
            batch.fill_chain([TEXT[i] for i in piece], int(piece[0]), [0], 0)
            rows = context.decode(batch)
            for layer in layers:
                found[layer] += [
                    rows.layer_input(token, layer).copy() for token in range(len(piece))
                ]
    return {layer: np.stack(states) for layer, states in found.items()}


@pytest.mark.parametrize(("pieces", "options"), [(1, {}), (3, {}), (10, {}), (1, {"n_ubatch": 4})])
def test_inputs_are_what_the_layers_before_have_made(
    model: Model, tiny_deep_model: Path, tmp_path: Path, pieces: int, options: dict[str, int]
) -> None:
    found = evaluated(model, (0, 1, 3), pieces, **options)
    embedding = next(
        tensor.data
        for tensor in GGUFReader(tiny_deep_model).tensors
        if tensor.name == "token_embd.weight"
    )
    np.testing.assert_array_equal(found[0], embedding[TEXT])
    for layer in (1, 3):
        expected = normed_states(tmp_path, layer, TEXT)
        np.testing.assert_allclose(
            normed(found[layer], tiny_deep_model), expected, rtol=1e-4, atol=1e-5
        )
        wrong = normed_states(tmp_path, layer + 1, TEXT)  # the control: one layer further
        assert np.abs(normed(found[layer], tiny_deep_model) - wrong).max() > 0.1


def test_rows_of_a_tree_belong_to_its_nodes(model: Model) -> None:
    """Two branches below one prefix, in one batch with outputs for some tokens only."""
    chain = evaluated(model, (2,), 1)[2]
    with Context(
        model, ContextOptions(**F32, n_sequences=2, n_outputs=3, layer_inputs=(2,))
    ) as context:
        batch = Batch(8, 2)
        # TEXT[:3], then TEXT[3] in sequence 0 with another token in sequence 1.
        ids = [0, 1, 0, 1, 0, 1, 0, 1]
        batch.fill(
            [*TEXT[:3], 99, TEXT[3]],
            [0, 1, 2, 3, 3],
            [2, 2, 2, 1, 1],
            [*ids[:6], 1, 0],
            [0, 0, 1, 1, 1],
        )
        rows = context.decode(batch)
        found = np.stack([rows.layer_input(token, 2) for token in range(5)])
        np.testing.assert_allclose(found[[0, 1, 2, 4]], chain[:4], rtol=1e-4, atol=1e-5)
        assert np.abs(found[3] - chain[3]).max() > 0.1
        with pytest.raises(OptionError, match="token 5 of an evaluation of 5 tokens"):
            rows.layer_input(5, 2)
        with pytest.raises(OptionError, match="without the inputs of layer 1"):
            rows.layer_input(0, 1)
        assert rows.count == 3
        assert rows.logits(2).shape == (320,)


def test_views_go_stale(model: Model) -> None:
    with Context(model, ContextOptions(**F32, layer_inputs=(1,))) as context:
        batch = Batch(1, 1)
        batch.fill_one(5, 0)
        rows = context.decode(batch)
        rows.layer_input(0, 1)
        batch.fill_one(6, 1)
        context.decode(batch)
        with pytest.raises(StaleViewError):
            rows.layer_input(0, 1)


def test_hidden_states_may_be_asked_for_beside_them(model: Model) -> None:
    with Context(
        model, ContextOptions(**F32, n_outputs=4, hidden_states=True, layer_inputs=(1,))
    ) as context:
        batch = Batch(4, 1)
        batch.fill_chain(TEXT[:4], 0, [0], 1)
        rows = context.decode(batch)
        np.testing.assert_allclose(
            rows.layer_input(3, 1), evaluated(model, (1,), 1)[1][3], rtol=1e-4, atol=1e-5
        )
        assert rows.hidden_states((0,)).shape == (1, WIDTH)


@pytest.mark.parametrize("layers", [(LAYERS,), (-1,), (0, 99)])
def test_layers_that_are_not_there_are_refused(model: Model, layers: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="layers 0 to 5"):
        Context(model, ContextOptions(**F32, layer_inputs=layers))


def test_contexts_without_layer_inputs_say_so(model: Model) -> None:
    with Context(model, ContextOptions(**F32)) as context:
        batch = Batch(1, 1)
        batch.fill_one(5, 0)
        with pytest.raises(OptionError, match="made without layer inputs"):
            context.decode(batch).layer_input(0, 1)


def test_an_architecture_without_them_is_refused_by_name(renamed: dict[str, Path]) -> None:
    assert WITHOUT not in LAYER_INPUT_ARCHITECTURES
    with Model(renamed[WITHOUT]) as model:
        with pytest.raises(
            UnsupportedModelError, match=f"layer inputs of {WITHOUT} models.*llama.*qwen3"
        ):
            Context(model, ContextOptions(**F32, layer_inputs=(1,)))
        Context(model, ContextOptions(**F32)).close()


@pytest.mark.parametrize("names", ["_SET", "_GET"])
def test_a_library_without_the_functions_is_refused(
    model: Model, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    monkeypatch.setattr(rows_module, names, ("llama_no_such_function", "_Z4nonev"))
    with pytest.raises(UnsupportedModelError, match="does not export llama_no_such_function"):
        check_layer_inputs(model, [1])


ASK = """
import sys
from specrun.bindings.contexts import rows
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context, ContextOptions
from specrun.bindings.models.model import Model
rows.LAYER_INPUT_ARCHITECTURES = frozenset({sys.argv[2]})
with Model(sys.argv[1]) as model, Context(model, ContextOptions(n_ctx=64, n_threads=1, layer_inputs=(1,))) as context:
    batch = Batch(2, 1)
    batch.fill_chain([5, 6], 0, [0], 1)
    rows = context.decode(batch)
    assert abs(rows.layer_input(1, 1)).max() > 0
"""  # noqa: E501 - as it is shown


@pytest.mark.parametrize(
    ("architecture", "lives"),
    [("llama", True), ("qwen3", True), ("qwen35", True), (WITHOUT, False)],
)
def test_the_list_says_who_survives_being_asked(
    renamed: dict[str, Path], architecture: str, lives: bool
) -> None:
    """In a process of its own, with the list out of the way."""
    command = [sys.executable, "-c", ASK, str(renamed[architecture]), architecture]
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=quiet
    )
    assert done.returncode == (0 if lives else -signal.SIGABRT), done.stderr
    assert (architecture in LAYER_INPUT_ARCHITECTURES) == lives
