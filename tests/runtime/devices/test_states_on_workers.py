"""What a device computes is what the CPU computes: logits, states, caches, trees and heads.

Weights and caches are F32, so that only the order of sums could differ: 1e-5. The worker computes
with the same kernels, so a difference would be one of what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings.contexts.batch import Batch
from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.ggml.weights import device_for_heads
from specrun.bindings.machine.devices import devices
from specrun.bindings.machine.placement import Placement, placing
from specrun.bindings.models.model import Model
from specrun.runtime.drafters.eagle import EagleHead
from specrun.runtime.drafters.hydra import HydraHead
from specrun.runtime.drafters.medusa import MedusaHead
from specrun.runtime.round import CachedText, TargetModel
from specrun.runtime.trees import ROOT, DraftTree, TreeBuilder

VOCABULARY, HIDDEN = 320, 32
TEXT = [5, 6, 7, 8, 9, 10, 11, 12]
STATES = np.random.default_rng(0).normal(size=(6, HIDDEN)).astype(np.float32)
Models = tuple[Model, Model]


@pytest.fixture(scope="module")
def models(files: dict[str, Path], worker: str) -> Iterator[Models]:
    """A target on the CPU, and the same on a worker."""
    with Model(files["shallow"]) as here:
        with placing(Placement(rpc=(worker,))):
            there = Model(files["shallow"], n_gpu_layers=-1)
        with there:
            assert [device.worker for device in there.placed.offload] == [worker]
            yield here, there


def both(models: Models, **options: object) -> list[Context]:
    settings = ContextOptions(**{**F32, **options})
    return [Context(model, settings) for model in models]


def test_logits_states_and_layer_inputs_are_those_of_the_cpu(models: Models) -> None:
    found = []
    for context in both(models, n_outputs=8, hidden_states=True, layer_inputs=(0, 1)):
        with context:
            batch = Batch(context.n_batch, 1)
            batch.fill_chain(TEXT, 0, [0], len(TEXT))
            rows = context.decode(batch)
            places = range(len(TEXT))
            found.append(
                [
                    np.stack([rows.logits(row).copy() for row in places]),
                    rows.hidden_states(places),
                    np.stack([rows.layer_input(row, 1).copy() for row in places]),
                ]
            )
    for here, there in zip(*found, strict=True):
        assert np.abs(here).max() > 0.1  # not two arrays of zeros
        np.testing.assert_allclose(there, here, atol=1e-5)


def fresh_logits(model: Model, tokens: list[int], shift: int = 0) -> np.ndarray:
    """The last token's logits on the CPU; `shift` moves it away from its position."""
    with Context(model, ContextOptions(**F32)) as context:
        batch = Batch(context.n_batch, 1)
        batch.fill_chain(tokens[:-1], 0, [0], 0)
        context.decode(batch)
        if shift:
            context.memory.truncate(len(tokens) - 1 - shift)
        batch.fill_one(tokens[-1], len(tokens) - 1 - shift)
        return context.decode(batch).logits(0).copy()


def random_tree(generator: np.random.Generator, n_nodes: int) -> DraftTree:
    builder = TreeBuilder()
    nodes = [ROOT]
    for _ in range(n_nodes):
        parent = int(generator.choice(nodes))
        nodes.append(builder.add(parent, int(generator.integers(VOCABULARY))))
    return builder.build()


@pytest.mark.parametrize("seed", range(3))
def test_trees_and_caches_on_a_device_are_those_of_single_tokens_on_the_cpu(
    models: Models, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    here, there = models
    with Context(there, ContextOptions(**F32, n_sequences=8, n_outputs=16)) as context:
        target, tokens = TargetModel(context), [int(token) for token in TEXT]
        text = CachedText(tokens)
        target.prefill(text, len(tokens) - 1)
        for _ in range(3):
            tree = random_tree(generator, 6)
            rows = target.evaluate(text, tree)
            for node in range(len(tree)):
                path = [tree.tokens[above] for above in tree.path_to(node)]
                wanted = fresh_logits(here, tokens + path)
                np.testing.assert_allclose(rows.logits(node + 1), wanted, atol=1e-5)
            accepted = tree.path_to(int(generator.integers(len(tree))))
            target.commit(text, tree, accepted)
            tokens += [tree.tokens[node] for node in accepted]
            tokens.append(int(generator.integers(VOCABULARY)))
            text.tokens.append(tokens[-1])
        np.testing.assert_allclose(
            target.evaluate(text, DraftTree()).logits(0), fresh_logits(here, tokens), atol=1e-5
        )


def test_a_position_shifted_by_one_is_seen(models: Models) -> None:
    """Negative control: the comparison above fails for a cache that is off by one position."""
    shifted = fresh_logits(models[0], TEXT, shift=1)
    assert np.abs(shifted - fresh_logits(models[0], TEXT)).max() > 1e-3


def test_heads_are_computed_where_the_output_matrix_lies(models: Models) -> None:
    here, there = models
    assert device_for_heads(here) == 0
    assert device_for_heads(there) == there.placed.offload[0].handle


def test_an_eagle_heads_graphs_and_cells(files: dict[str, Path], models: Models) -> None:
    sees = np.tril(np.ones((6, 6), bool))
    found = []
    for model in models:
        with (
            closing(EagleHead(files["eagle"], model, n_threads=1, ranks=3)) as head,
            closing(head.cells(32)) as cells,
        ):
            places = range(4), range(4), 0, sees[:4, :4].copy()
            first = cells.evaluate(TEXT[:4], STATES[:4], places, real=True)
            # Their keys and values have stayed in the cells, on the device.
            places = range(4, 6), range(4, 6), 0, sees[4:]
            later = cells.evaluate(TEXT[4:6], STATES[4:], places)
            found.append([first.states, first.log_probs, later.states, later.log_probs])
            assert all(head._target.shared.values())
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(there, here, atol=1e-5)


def test_medusas_and_hydras_heads_name_the_same_tokens(
    files: dict[str, Path], models: Models
) -> None:
    named: list[list[object]] = []
    for model in models:
        with (
            closing(MedusaHead(files["medusa"], model, n_threads=1, ranks=[5, 5])) as medusa,
            closing(HydraHead(files["hydra"], model, n_threads=1, ranks=[5, 5])) as hydra,
        ):
            named.append(
                [
                    [said.tokens for said in medusa.said_of(STATES)],
                    [hydra.best_laws(state[None], [[7]]).tokens.tolist() for state in STATES],
                ]
            )
    assert named[0] == named[1]
    assert len({str(tokens) for tokens in named[0][0]}) > 1  # or states would not matter


def test_tensors_on_another_device_are_copied_with_a_message(
    files: dict[str, Path],
    models: Models,
    workers: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = models
    names = {device.worker: device.name for device in devices(workers)}
    places = range(6), range(6), 0, np.tril(np.ones((6, 6), bool))
    chosen = Placement(rpc=workers, devices_draft=(names[workers[1]],))
    found = []
    for model, placement in ((here, Placement()), (there, chosen)):
        with (
            placing(placement),
            caplog.at_level("INFO"),
            closing(EagleHead(files["eagle"], model, n_threads=1, ranks=3)) as head,
            closing(head.cells(32)) as cells,
        ):
            rows = cells.evaluate(TEXT[:6], STATES, places, real=True)
            found.append((rows.states, rows.log_probs, dict(head._target.shared)))
    # llama.cpp keeps the embedding in the CPU's memory, which every graph reaches.
    assert found[0][2] == {"token_embd.weight": True, "output.weight": True}
    assert found[1][2] == {"token_embd.weight": True, "output.weight": False}
    assert caplog.text.count("output.weight cannot be shared") == 1
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
