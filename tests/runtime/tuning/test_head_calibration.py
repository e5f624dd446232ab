"""Calibration counts what an independent reference counts, and the trees made from it are what the
heads deserve."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.tiny_dflash import Generation, TinyDFlash, token_matrices
from support.tiny_eagle import random_eagle
from support.tiny_heads import TinyMedusa, random_medusa
from support.tiny_models import F32

from specrun.bindings.contexts.context import Context
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.bindings.errors import OptionError, PairError, UnsupportedModelError
from specrun.bindings.models.model import Model
from specrun.convert.heads.head_conversion import store_accuracy, write_accuracy_csv
from specrun.runtime import Runtime, SamplingParams
from specrun.runtime.heads import Accuracy, RankCounts, read_accuracy_csv
from specrun.runtime.language import quoted
from specrun.runtime.memory import LoadOptions
from specrun.runtime.tuning import (
    CalibrationText,
    HeadCalibration,
    HeadCalibrationOptions,
    calibrate_heads,
    features_along,
)

pytestmark = pytest.mark.usefixtures("own_cache")

HIDDEN, VOCAB, RANKS = 32, 320, 20
CONTEXT = ContextOptions(**F32)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = [[5 + seed, 6, 7 + seed] for seed in range(8)]


def options_for(target: Path, heads: Path, **changes: object) -> HeadCalibrationOptions:
    values = {
        "n_tokens": 64,
        "ranks": RANKS,
        "seconds": 0.0,
        "loading": LoadOptions(CONTEXT, n_gpu_layers=0),
        **changes,
    }
    return HeadCalibrationOptions(target, heads, **values)  # type: ignore[arg-type]


def calibrated(
    target: Path, heads: Path, text: Sequence[int], **changes: object
) -> HeadCalibration:
    return calibrate_heads(
        options_for(target, heads, **changes), lambda _: [CalibrationText(tuple(text), 0)]
    )


def states_of(path: Path, text: Sequence[int]) -> np.ndarray:
    with (
        Model(path) as model,
        Context(model, dataclasses.replace(CONTEXT, n_outputs=64, hidden_states=True)) as context,
    ):
        return features_along(context, text)


@pytest.fixture(scope="module")
def texts(tiny_model: Path) -> list[list[int]]:
    with Runtime(tiny_model, "none", **F32) as runtime:
        return [
            [*prompt, *runtime.generate(prompt, GREEDY, max_tokens=40).token_ids]
            for prompt in PROMPTS
        ]


@pytest.fixture(scope="module")
def fitted(
    tiny_model: Path, texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three heads fitted to greedy texts by ridge regression from the hidden state to the token
    that comes."""
    states = [states_of(tiny_model, text) for text in texts]
    outputs = []
    for k in range(3):
        x = np.concatenate(
            [state[: len(text) - k - 2] for state, text in zip(states, texts, strict=True)]
        )
        y = np.eye(VOCAB, dtype=np.float32)[np.concatenate([text[k + 2 :] for text in texts])]
        outputs.append(
            np.linalg.solve(x.T @ x + 0.1 * np.eye(HIDDEN), x.T @ y).T.astype(np.float32)
        )
    block = (np.zeros((HIDDEN, HIDDEN), np.float32), np.zeros(HIDDEN, np.float32))
    heads = TinyMedusa([[block]] * 3, outputs)
    return heads.write(tmp_path_factory.mktemp("heads") / "fitted.gguf", VOCAB)


# -- counting --------------------------------------------------------------------------------------


def test_counts_by_hand() -> None:
    counts = RankCounts(2, 2)
    counts.add([[7, 8], [1, 2]], [7, 2])  # right at rank 0, then at rank 1
    counts.add([[7, 8], [1, 2]], [9, 1])  # wrong, so the next is not on a path
    counts.add([[7, 8], [1, 2]], [8, 5])
    counts.add([[7, 8]], [7])  # the text ends here
    assert counts.n_positions == 4
    assert counts.accuracy == (
        (0.5, 0.25),
        (0.0, 0.5),
    )  # the second of the two positions that the first reached
    assert counts.alone == ((0.5, 0.25), (1 / 3, 1 / 3))
    assert counts.n_reached == (4, 2)


def test_products_add_up_to_the_share_of_right_paths() -> None:
    """Summed over all paths of a depth the products are the share of positions at which some path
    is right."""
    rng = np.random.default_rng(0)
    depths, ranks = 3, 4
    counts = RankCounts(depths, ranks)
    found = [0] * depths
    for _ in range(500):
        luck = (
            rng.random() < 0.5
        )  # where one head is right the others are, too: what independence would miss
        guesses = [rng.permutation(6 if luck else 30)[:ranks].tolist() for _ in range(depths)]
        right = [0] * depths
        counts.add(guesses, right)
        for depth in range(depths):
            found[depth] += all(0 in tokens for tokens in guesses[: depth + 1])
    for depth in range(depths):
        paths = itertools.product(range(ranks), repeat=depth + 1)
        total = sum(
            np.prod([counts.accuracy[k][rank] for k, rank in enumerate(path)]) for path in paths
        )
        assert total == pytest.approx(found[depth] / 500)
    independent = np.prod([sum(row) for row in counts.alone])
    assert independent < 0.7 * found[-1] / 500  # the control: heads taken for independent


def rank_in(logits: np.ndarray, token: int) -> int:
    return int((logits > logits[token]).sum())


def accuracy_from(ranks: list[list[int]], depths: int) -> Accuracy:
    """Accuracies from the rank of the right token at each position and depth, as the definition
    says."""
    table = []
    for depth in range(depths):
        reached = [
            rank
            for rank in ranks
            if len(rank) > depth and all(rank < RANKS for rank in rank[:depth])
        ]
        table.append(
            tuple(
                sum(guessed[depth] == rank for guessed in reached) / max(1, len(reached))
                for rank in range(RANKS)
            )
        )
    return tuple(table)


def test_medusa_is_counted_as_by_the_reference(
    tiny_model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    heads = random_medusa(HIDDEN, VOCAB, seed=3)
    path = heads.write(tmp_path / "heads.gguf", VOCAB)
    text = texts[0]
    result = calibrated(tiny_model, path, text)
    states = states_of(tiny_model, text)
    ranks = [
        [
            rank_in(heads.logits(k, states[t], np.zeros(1)), text[t + 2 + k])
            for k in range(3)
            if t + 2 + k < len(text)
        ]
        for t in range(len(text) - 2)
    ]
    assert result.counts.n_positions == len(text) - 2
    np.testing.assert_allclose(np.array(result.counts.accuracy), np.array(accuracy_from(ranks, 3)))
    assert sum(map(sum, result.counts.alone)) > 0.0
    shifted = [rank[1:] for rank in ranks]  # the control: heads taken for the ones after them
    assert not np.allclose(np.array(result.counts.accuracy), np.array(accuracy_from(shifted, 3)))


@pytest.mark.parametrize("sizes", [{}, {"prefix": True}, {"grounded": False}])
def test_hydra_is_counted_as_by_the_reference(
    tiny_model: Path, texts: list[list[int]], tmp_path: Path, sizes: dict[str, bool]
) -> None:
    """Each head gets the text's own tokens up to its own."""
    torch = pytest.importorskip("torch")
    from gguf import GGUFReader
    from support.tiny_hydra import log_probs, random_hydra

    tensors = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(tiny_model).tensors}
    heads = random_hydra(HIDDEN, VOCAB, seed=3, **sizes)  # type: ignore[arg-type]
    path = heads.write(tmp_path / "heads.gguf", VOCAB)
    text = texts[0]
    result = calibrated(tiny_model, path, text)
    states = (
        heads.double()
        .read_states(torch.tensor(states_of(tiny_model, text), dtype=torch.float64))
        .numpy()
    )

    def rank(t: int, k: int) -> int:
        path = text[t + 1 : t + 2 + k]
        laws = log_probs(
            heads, states[t], [path], tensors["token_embd.weight"], tensors["output.weight"]
        )
        return rank_in(laws[0], text[t + 2 + k])

    ranks = [[rank(t, k) for k in range(3) if t + 2 + k < len(text)] for t in range(len(text) - 2)]
    assert result.counts.n_positions == len(text) - 2
    np.testing.assert_allclose(np.array(result.counts.accuracy), np.array(accuracy_from(ranks, 3)))
    assert sum(map(sum, result.counts.alone)) > 0.0


def test_eagle_is_counted_as_by_the_reference(
    tiny_model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    """Below each place the reference goes on from its own predictions with the text's tokens."""
    from gguf import GGUFReader, quants

    tensors = {
        tensor.name: quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in GGUFReader(tiny_model).tensors
    }
    embedding = tensors["token_embd.weight"]
    output = tensors.get("output.weight", embedding)
    head = random_eagle(HIDDEN, seed=5)
    path = head.write(tmp_path / "eagle.gguf", VOCAB)
    text, depths = texts[1][:24], 5
    result = calibrated(tiny_model, path, text)
    states = states_of(tiny_model, text)
    ranks = []
    for t in range(len(text) - 2):
        features, own = list(states[: t + 1]), []
        for depth in range(min(depths, len(text) - t - 2)):
            n = len(features)
            embedded = embedding[text[1 : n + 1]]
            features.append(
                head.states(embedded, np.array(features), range(n), np.tri(n, dtype=bool))[-1]
            )
            own.append(rank_in(output @ features[-1], text[t + 2 + depth]))
        ranks.append(own)
    wanted = accuracy_from(ranks, depths)
    np.testing.assert_allclose(np.array(result.counts.accuracy), np.array(wanted))
    assert result.counts.n_reached[0] == len(text) - 2


def test_eagle3_is_counted_as_by_the_reference(tiny_deep_model: Path, tmp_path: Path) -> None:
    """Its features are layer inputs, and its tokens those of a draft vocabulary."""
    import torch
    from gguf import GGUFReader
    from support.tiny_eagle3 import random_eagle3

    torch.set_num_threads(1)
    tensors = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(tiny_deep_model).tensors}
    embedding = torch.tensor(tensors["token_embd.weight"], dtype=torch.float64)
    head = random_eagle3(embedding.shape[1], len(embedding))
    path = head.write(tmp_path / "eagle3.gguf", tiny_deep_model)
    with Runtime(tiny_deep_model, "none", **F32) as runtime:
        text = [5, 6, 7, *runtime.generate([5, 6, 7], GREEDY, max_tokens=20).token_ids]
    result = calibrated(tiny_deep_model, path, text)
    options = dataclasses.replace(CONTEXT, n_outputs=64, layer_inputs=tuple(sorted(head.taps)))
    with Model(tiny_deep_model) as model, Context(model, options) as context:
        features = torch.tensor(features_along(context, text, head.taps), dtype=torch.float64)
    w, ids = head.tensors(), head.target_ids
    fused, ranks = head.fused(w, features), []
    for t in range(len(text) - 2):
        states, own = fused[: t + 1], []
        for depth in range(min(5, len(text) - t - 2)):
            n = len(states)
            embedded = embedding[text[1 : n + 1]]
            fed_back, read = head.predicted(w, embedded, states, range(n), np.tri(n, dtype=bool))
            logits = np.full(len(embedding), -np.inf)
            logits[slice(None) if ids is None else ids] = (read[-1] @ w["lm_head.weight"].T).numpy()
            own.append(rank_in(logits, text[t + 2 + depth]))
            states = torch.cat([states, fed_back[-1:]])
        ranks.append(own)
    np.testing.assert_allclose(np.array(result.counts.accuracy), np.array(accuracy_from(ranks, 5)))
    assert sum(map(sum, result.counts.alone)) > 0.0


@pytest.mark.parametrize("generation", ["dflash", "dflash2", "dspark"])
def test_a_block_drafter_is_counted_as_by_the_reference(
    tiny_deep_model: Path, tmp_path: Path, generation: Generation
) -> None:
    """Each slot below the text's tokens; of DFlash2 only as far as these are candidates."""
    tokens = token_matrices(tiny_deep_model)
    size, width = tokens[0].shape
    tiny = TinyDFlash(generation, vocab_size=size, width=width, spread=0.3)
    path = tiny.write(tmp_path / "block.gguf", tiny_deep_model)
    with Runtime(tiny_deep_model, **F32) as runtime:
        text = [5, 6, 7, *runtime.generate([5, 6, 7], GREEDY, max_tokens=20).token_ids]
    result = calibrated(tiny_deep_model, path, text)
    options = dataclasses.replace(CONTEXT, n_outputs=64, layer_inputs=(0, 1))
    with Model(tiny_deep_model) as model, Context(model, options) as context:
        features = features_along(context, text, tiny.taps).astype(np.float64)
    ranks = []
    for t in range(len(text) - 2):
        states, logits = tiny.block(features[: t + 1], text[t + 1], tiny.block_size, tokens)
        lattice = tiny.lattice(states, logits, text[t + 1]) if generation == "dflash2" else []
        own, above = [], np.array([text[t + 1]])
        for slot in range(min(tiny.n_slots, len(text) - t - 2)):
            row, before = logits[slot + tiny.first], text[t + 1 + slot]
            if generation == "dspark":
                row = row + tiny.bias(before)
            elif lattice and before not in above:
                break
            elif lattice:
                (names, scores), place = lattice[slot], above.tolist().index(before)
                row, above = np.full(size, -np.inf), names
                row[names] = scores[place]
            known = np.isfinite(row[text[t + 2 + slot]])
            own.append(rank_in(row, text[t + 2 + slot]) if known else size)
        ranks.append(own)
    wanted = accuracy_from(ranks, tiny.n_slots)
    np.testing.assert_allclose(np.array(result.counts.accuracy), np.array(wanted))
    assert result.counts.n_positions == len(text) - 2


def test_prompts_are_continued_and_not_counted(
    tiny_model: Path, fitted: Path, texts: list[list[int]]
) -> None:
    options = options_for(tiny_model, fitted, n_tokens=60)
    prompts = [CalibrationText(tuple(prompt), len(prompt)) for prompt in PROMPTS[:2]]
    written = calibrate_heads(options, lambda _: prompts)
    read = calibrate_heads(
        options, lambda _: [CalibrationText(tuple(text[: 3 + 32]), 3) for text in texts[:2]]
    )
    assert (
        written.counts.n_positions == read.counts.n_positions == 60
    )  # the first guessed token is the prompt's successor
    assert written.counts.accuracy == read.counts.accuracy


# -- what follows from it --------------------------------------------------------------------------


def test_the_tree_yields_about_what_was_predicted(
    tiny_model: Path, fitted: Path, texts: list[list[int]]
) -> None:
    options = options_for(tiny_model, fitted, n_tokens=10_000, ranks=4)
    result = calibrate_heads(options, lambda _: [CalibrationText(tuple(text), 3) for text in texts])
    assert result.plan is not None
    assert result.counts.accuracy[0][0] > 0.3  # by chance a token is right once in 320 times
    path = fitted.with_name("kept.gguf")
    path.write_bytes(fitted.read_bytes())
    store_accuracy(path, result.counts.accuracy, n_positions=result.counts.n_positions)
    planned = f"medusa({quoted(str(path))}, tree={quoted(str(result.plan.topology))})"
    with Runtime(tiny_model, drafter=planned, **F32) as runtime:
        assert str(runtime.session.drafter._shape) == str(result.plan.topology)  # type: ignore[attr-defined]
        stats = [runtime.generate(prompt, GREEDY, max_tokens=40).stats for prompt in PROMPTS]
    # The first round of an answer drafts nothing.
    measured = sum(stat.accepted for stat in stats) / sum(stat.rounds - 1 for stat in stats)
    assert 1.0 + measured == pytest.approx(result.plan.expected_tokens, rel=0.2)


def test_random_heads_promise_nothing(
    tiny_model: Path, texts: list[list[int]], tmp_path: Path
) -> None:
    path = random_medusa(HIDDEN, VOCAB).write(tmp_path / "random.gguf", VOCAB)
    result = calibrated(tiny_model, path, texts[0], ranks=1)
    assert result.plan is None or result.plan.speed_up < 1.0


def test_eagles_planned_trees_read_measured_accuracies(tiny_model: Path, tmp_path: Path) -> None:
    path = random_eagle(HIDDEN).write(tmp_path / "eagle.gguf", VOCAB)
    deep, wide = tmp_path / "deep.csv", tmp_path / "wide.csv"
    write_accuracy_csv(deep, ((0.9, 0.01), (0.9, 0.01), (0.9, 0.01)))
    write_accuracy_csv(wide, ((0.3, 0.3, 0.3), (0.1,)))
    head = quoted(str(path))
    assert (
        tree_of(tiny_model, f"eagle({head}, tree=sequoia, nodes=3, accuracy={quoted(str(deep))})")
        == "0 00 000"
    )
    assert (
        tree_of(tiny_model, f"eagle({head}, tree=sequoia, nodes=3, accuracy={quoted(str(wide))})")
        == "0 1 2"
    )
    store_accuracy(path, ((0.9, 0.01), (0.9, 0.01)), n_positions=100)
    assert tree_of(tiny_model, f"eagle({head}, tree=sequoia, nodes=2)") == "0 00"
    assert tree_of(tiny_model, f"eagle({head}, tree=sequoia)").startswith("0")
    assert len(tree_of(tiny_model, f"eagle({head}, tree=mc_sim_7b_63)").split()) == 25
    for options in ("nodes=8", "tree=sequoia, sampling=without"):
        with pytest.raises(OptionError, match="accuracy= is only for tree=sequoia"):
            Runtime(
                tiny_model, drafter=f"eagle({head}, {options}, accuracy={quoted(str(deep))})", **F32
            )


def tree_of(target: Path, expression: str) -> str:
    with Runtime(target, drafter=expression, **F32) as runtime:
        return str(runtime.session.drafter._shape)  # type: ignore[attr-defined]


# -- faults ----------------------------------------------------------------------------------------


def test_what_cannot_be_calibrated_is_refused(
    tiny_model: Path, tiny_drafter: Path, fitted: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match="accuracies are measured for medusa"):
        calibrated(tiny_model, tiny_drafter, [5, 6, 7, 8])
    wide = random_medusa(2 * HIDDEN, VOCAB).write(tmp_path / "wide.gguf", VOCAB)
    with pytest.raises(PairError, match="64 numbers, and the target's have 32"):
        calibrated(tiny_model, wide, [5, 6, 7, 8])
    with pytest.raises(OptionError, match="the text is too short"):
        calibrated(tiny_model, fitted, [5, 6])
    for changes, problem in (
        ({"n_tokens": 3}, "are too few"),
        ({"ranks": 0}, "1 to 32"),
        ({"seconds": -1.0}, "no time"),
    ):
        with pytest.raises(OptionError, match=problem):
            options_for(tiny_model, fitted, **changes)


def test_what_the_csv_says_is_what_was_written(tmp_path: Path) -> None:
    accuracy = ((0.5, 0.25), (0.125, 0.0))
    write_accuracy_csv(tmp_path / "a.csv", accuracy, ((0.5, 0.25), (0.3, 0.1)))
    assert read_accuracy_csv(tmp_path / "a.csv") == accuracy
    assert (tmp_path / "a.csv").read_text().splitlines()[3] == "1,0,0.125000,0.300000"
    with pytest.raises(OptionError, match="already exists"):
        write_accuracy_csv(tmp_path / "a.csv", accuracy)
