"""Early exits: the law of a cut of the same layers, whatever the cells held; what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.renamed_models import as_architecture
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions, RopeScaling
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.convert.cut import cut_layers
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.drafters.early_exit import ExitLayers

LAYERS = 4
TEXT = [(7 * place * place + 3 * place + 11) % 300 for place in range(100)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exit") / "target.gguf"
    write_random_llama(path, RandomLlama(**{**CHAT, "layers": LAYERS}))
    return path


@pytest.fixture
def model(target: Path) -> Iterator[Model]:
    with Model(target) as opened:
        yield opened


def llama_cpps(path: Path, text: list[int]) -> np.ndarray:
    """The logits of every token by llama.cpp."""
    with Model(path) as model:
        options = ContextOptions(**F32, n_outputs=len(text))
        with Context(model, options) as context:
            batch = Batch(len(text), 1)
            batch.fill_chain(text, 0, (0,), len(text))
            rows = context.decode(batch)
            return np.stack([rows.logits(row) for row in range(len(text))])


@pytest.mark.parametrize("layers", [1, 3, LAYERS])
def test_an_exit_says_what_a_cut_of_its_layers_says(
    target: Path, model: Model, layers: int, tmp_path: Path
) -> None:
    cut = target
    if layers < LAYERS:
        cut = tmp_path / "cut.gguf"
        cut_layers(target, cut, layers=f"0-{layers - 1}")
    wanted = llama_cpps(cut, TEXT)
    with (
        closing(ExitLayers(model, layers)) as exit_layers,
        closing(exit_layers.cells(128)) as cells,
    ):
        found = np.concatenate([cells.rows(TEXT[:30]).copy(), cells.rows(TEXT[30:]).copy()])
        assert np.abs(found - wanted).max() < 1e-4
        assert np.abs(found[1:] - wanted[:-1]).max() > 0.1  # the comparison can fail
        # In pieces, and again after a part was dropped.
        assert np.abs(cells.after(TEXT, 0) - wanted[-1]).max() < 1e-4
        assert np.abs(cells.after(TEXT[:50], 20) - wanted[49]).max() < 1e-4
        assert cells.tokens == TEXT[:50]
        assert np.abs(cells.after(TEXT[:50], 50) - wanted[49]).max() < 1e-4
        assert all(exit_layers._tensors.shared.values())  # the weights are the target's own


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chosen_drafts_leave_the_text_as_it_is(target: Path, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    texts, drafted = [], []
    for drafter in ("none", "early-exit(layers=3, n=3, sampling=argmax)"):
        with Runtime(target, drafter, n_ctx=128, n_threads=1) as runtime:
            for prompt in (TEXT[:9], TEXT[:5]):
                made = runtime.generate(prompt, params, max_tokens=20)
                texts.append(made.token_ids)
                drafted.append(made.stats.accepted)
    assert texts[:2] == texts[2:]
    assert drafted[2] + drafted[3] > 0


def test_what_it_cannot_compute_is_refused(target: Path, tmp_path: Path) -> None:
    for layers in (0, LAYERS):
        with pytest.raises(OptionError, match=f"an exit after {layers} layers: .* has {LAYERS}"):
            Runtime(target, f"early-exit(layers={layers})", n_ctx=64)
    with pytest.raises(OptionError, match="n is 0: give 1 to"):
        Runtime(target, "early-exit(n=0)", n_ctx=64)
    other = as_architecture(target, tmp_path / "xverse.gguf", "xverse")
    with pytest.raises(UnsupportedModelError, match="its architecture is xverse, and not llama"):
        Runtime(other, "early-exit", n_ctx=64)
    with pytest.raises(OptionError, match="leave out the options that scale them"):
        Runtime(target, "early-exit", n_ctx=64, rope=RopeScaling(scale=2.0))


def test_cells_and_tokens_have_bounds(model: Model) -> None:
    with closing(ExitLayers(model, 1)) as layers, closing(layers.cells(8)) as cells:
        with pytest.raises(OptionError, match="a token outside the 320 of the target"):
            cells.rows([320])
        with pytest.raises(OptionError, match="cells cannot hold"):
            cells.rows([1] * (cells.n_cells + 1))
