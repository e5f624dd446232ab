"""EAGLE-3's head beside llama.cpp's own graphs for the same file: the same states and the same
logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.llama_eagle3 import LlamaEagle3
from support.tiny_eagle3 import LLAMA3, Variant, random_eagle3
from support.tiny_models import F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import ModelLoadError
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle import Eagle3Head

HIDDEN, VOCAB, LAYERS, TAPS = 32, 320, 6, (1, 3, 5)
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]

# What llama.cpp's graph has; EAGLE-3.1's fc_norm and norm_output are ours.
VARIANTS = {
    "SafeAILab": Variant(),
    "speculators": Variant(changes={"norm_before_residual": True}, own_embedding=True),
    "norm_before_fc": Variant(norm_before_fc=True),
    "llama3 rope": Variant(changes={"rope_scaling": LLAMA3}, n_kv_heads=1),
    "linear rope": Variant(changes={"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "all tokens": Variant(draft_tokens=None),
}


@pytest.fixture(scope="module")
def context(tiny_deep_model: Path) -> Iterator[Context]:
    """The target, with the taps on."""
    with (
        Model(tiny_deep_model) as model,
        Context(model, ContextOptions(**F32, n_outputs=8, layer_inputs=TAPS)) as opened,
    ):
        yield opened


def taps_of(context: Context) -> np.ndarray:
    context.memory.clear()
    batch = Batch(len(TEXT), 1)
    batch.fill_chain(TEXT, 0, [0], 1)
    rows = context.decode(batch)
    return np.stack(
        [np.concatenate([rows.layer_input(i, layer) for layer in TAPS]) for i in range(len(TEXT))]
    )


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_round_is_llama_cpps_own(
    context: Context, tiny_deep_model: Path, tmp_path: Path, variant: Variant
) -> None:
    """Seven real pairs and two drafted ones; then the drafts are taken back, and other ones
    made."""
    path = random_eagle3(HIDDEN, VOCAB, variant).write(tmp_path / "e.gguf", tiny_deep_model)
    features = taps_of(context)
    theirs = LlamaEagle3(path, context)
    ours = Eagle3Head(path, context.model, ranks=5, whole_rows=True, n_threads=1)
    cells = ours.cells(64)
    n = len(TEXT) - 1
    states, logits = theirs.decode(TEXT[1:], theirs.encode(features)[:n], 0)
    places = range(n), range(n), 0, np.tri(n, dtype=bool)
    rows = cells.evaluate(TEXT[1:], features[:n], places, real=True)
    compare(rows, states, logits)
    for drafted in ([20, 21], [30, 31]):
        state, row = rows.states[-1:], states[-1:]
        for depth, token in enumerate(drafted):
            at = n + depth
            found = cells.evaluate([token], state, ([at], [at], at, np.ones((1, 1), bool)))
            row, logits = theirs.decode([token], row, at)
            compare(found, row, logits)
            state = found.states
        theirs.truncate(n)
    cells.close()
    ours.close()
    theirs.close()


def compare(rows, states: np.ndarray, logits: np.ndarray) -> None:
    np.testing.assert_allclose(rows.states, states, rtol=1e-4, atol=1e-4)
    assert ((rows.logits == -np.inf) == (logits == -np.inf)).all()
    known = np.isfinite(logits)
    np.testing.assert_allclose(rows.logits[known], logits[known], rtol=1e-4, atol=1e-4)
    assert (rows.tokens[:, 0] == logits.argmax(1)).all()


def test_files_with_more_norms_than_llama_cpp_knows_are_refused_there(
    tiny_deep_model: Path, tmp_path: Path
) -> None:
    """So that nobody drafts with half a head: EAGLE-3.1's norms of single layers are ours."""
    path = random_eagle3(HIDDEN, VOCAB, Variant(fc_norm=True)).write(
        tmp_path / "e.gguf", tiny_deep_model
    )
    with pytest.raises(ModelLoadError, match="wrong number of tensors"):
        Model(path)
