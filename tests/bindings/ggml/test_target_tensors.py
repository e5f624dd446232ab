"""The target's matrices in a head's graph: shared if that works, and the same numbers if it
does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.ggml import F32, I32, ComputeDevice, GraphBuilder, TargetTensors, weights
from specrun.bindings.models import Model

TOKENS = [5, 6, 7, 8]


@pytest.fixture
def device() -> Iterator[ComputeDevice]:
    device = ComputeDevice(n_threads=1)
    yield device
    device.close()


def states_and_logits(model: Model) -> tuple[np.ndarray, np.ndarray]:
    options = ContextOptions(
        n_ctx=256,
        n_threads=1,
        n_outputs=8,
        hidden_states=True,
        cache_type_k="f32",
        cache_type_v="f32",
    )
    with Context(model, options) as context:
        batch = Batch(context.n_batch, 1)
        batch.fill_chain(TOKENS, 0, [0], len(TOKENS))
        rows = context.decode(batch)
        count = range(len(TOKENS))
        return rows.hidden_states(count), np.array([rows.logits(row) for row in count])


@pytest.mark.parametrize("reachable", [True, False])
def test_the_output_matrix_turns_final_states_into_the_targets_logits(
    device: ComputeDevice, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    if not reachable:
        monkeypatch.setattr(weights, "_tensor_of", lambda *_: None)
    with Model(tiny_model) as model:
        tensors = TargetTensors(model, device)
        builder = GraphBuilder(device)
        state = builder.input("state", F32, model.n_embd, len(TOKENS))
        rows = builder.input("tokens", I32, len(TOKENS))
        builder.output("logits", builder.mul_mat(tensors.output(), state))
        builder.output("embeddings", builder.get_rows(tensors.embedding(), rows))
        graph = builder.build()
        states, logits = states_and_logits(model)
        result = graph.run({"state": states, "tokens": np.array(TOKENS)})
        graph.close()
        assert set(tensors.shared.values()) == {reachable}
        tensors.close()
    np.testing.assert_allclose(result["logits"], logits, atol=1e-5)
    embedding = stored(tiny_model, "token_embd.weight")
    np.testing.assert_allclose(result["embeddings"], embedding[TOKENS], atol=1e-6)


def stored(path: Path, name: str) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    (tensor,) = [info for info in gguf.GGUFReader(path).tensors if info.name == name]
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
