"""Block drafters against a numpy reference: encoder, block, Markov head, confidence, selector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_dflash import TinyDFlash, greedy_chain, token_matrices, variant
from support.tiny_models import CHAT, F32

from specrun.bindings.contexts import (
    BlockContext,
    Context,
    ContextOptions,
    Lender,
    block_options,
    needs_lender,
)
from specrun.bindings.contexts.batch import Batch
from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.models import Model
from specrun.convert.random_model import RandomLlama, write_random_llama
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState

VARIANTS = [
    TinyDFlash(),
    TinyDFlash(taps=(1, 0, 1)),
    TinyDFlash(own_tokens=True),
    TinyDFlash(draft_tokens=70),
    TinyDFlash(causal=True),
    TinyDFlash(window=3),
    TinyDFlash(window=5, whole_window=True),
    TinyDFlash(mrope=True),
    TinyDFlash("dspark"),
    TinyDFlash("dspark", from_anchor=False, seed=3),
    TinyDFlash("dspark", draft_tokens=70),
    TinyDFlash("dspark", confidence=False, own_tokens=True),
    TinyDFlash("dflash2"),
    TinyDFlash("dflash2", kernel=8, group=16, own_tokens=True),
    TinyDFlash("dflash2", draft_tokens=70),
]


def titled(tiny: TinyDFlash) -> str:
    usual = TinyDFlash(tiny.generation)
    changed = [name for name in vars(usual) if getattr(tiny, name) != getattr(usual, name)]
    return "-".join([tiny.generation, *changed])


LAST, TEXT = 7, 70  # more than are put into cells at once


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dflash") / "target.gguf"
    write_random_llama(path, RandomLlama(**CHAT))
    return path


@contextmanager
def opened(tiny: TinyDFlash, target: Path, folder: Path) -> Iterator[BlockDrafter]:
    path = tiny.write(folder / "drafter.gguf", target)
    with Model(target) as model:
        drafter = BlockDrafter(path, model, n_threads=1)
        try:
            yield drafter
        finally:
            drafter.close()


@pytest.mark.parametrize("tiny", VARIANTS, ids=titled)
def test_rows_are_those_of_the_reference(tiny: TinyDFlash, target: Path, tmp_path: Path) -> None:
    """Whatever tokens are drafted, not only the most likely ones, and again after a rejection."""
    random = np.random.default_rng(1)
    features = random.standard_normal((TEXT, len(tiny.taps) * tiny.width)).astype(np.float32)
    text = random.integers(6, 300, TEXT + 1).tolist()
    options = ContextOptions(**{**F32, "n_ctx": 128})
    with opened(tiny, target, tmp_path) as drafter:
        cells = drafter.cells(options, tiny.n_slots)
        state = BlockState(cells)
        for length in (9, TEXT, 40):  # forwards, and back to a text of other tokens
            state.begin([*text[:length], LAST])
            state.learn(0, features[:length], [*text[:length], LAST])
            rows = state.block([*text[:length], LAST], tiny.n_slots)
            assert rows is not None
            wanted, logits = tiny.block(
                features[:length].astype(np.float64), LAST, tiny.block_size, token_matrices(target)
            )
            lattice = tiny.lattice(wanted, logits, LAST) if tiny.generation == "dflash2" else []
            above = [LAST]
            for slot in range(tiny.n_slots):
                found = rows.after(slot, above)
                row = logits[slot + tiny.first]
                assert found.whole is not None
                chosen = rows.after(slot, above, points=True).highest
                for place, token in enumerate(above):
                    expected = row
                    if tiny.generation == "dspark":
                        expected = row + tiny.bias(token)
                    elif lattice:
                        names, scores = lattice[slot]
                        before = 0 if slot == 0 else lattice[slot - 1][0].tolist().index(token)
                        expected = np.full(tiny.vocab_size, -np.inf)
                        expected[names] = scores[before]
                    about(found.whole[place], expected)
                    if chosen is not None:  # the best tokens alone
                        names = chosen.tokens[place]
                        assert expected.argmax() in names
                        about(chosen.logits[place], expected[names])
                if lattice:
                    above = lattice[slot][0].tolist()
                else:
                    above = [int(row.argmax()), *random.integers(0, 320, 3).tolist()]
        cells.close()


def about(found: Any, wanted: Any) -> None:
    """Equal within 1e-4, and minus infinity at the same tokens."""
    finite = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(found), finite)
    assert np.abs(found[finite] - wanted[finite]).max() < 1e-4


@pytest.mark.parametrize(
    "tiny",
    [tiny for tiny in VARIANTS if tiny.generation == "dspark" and tiny.confidence],
    ids=titled,
)
def test_confidences_are_those_of_the_reference(
    tiny: TinyDFlash, target: Path, tmp_path: Path
) -> None:
    features = np.random.default_rng(2).standard_normal((5, len(tiny.taps) * tiny.width))
    states, logits = tiny.block(features, LAST, tiny.block_size, token_matrices(target))
    chain = [LAST, *greedy_chain(tiny, logits, LAST)]
    wanted = [tiny.confident(states[tiny.first + n], chain[n]) for n in range(tiny.n_slots)]
    with opened(tiny, target, tmp_path) as drafter:
        cells = drafter.cells(ContextOptions(**F32), tiny.n_slots)
        state = BlockState(cells)
        state.learn(0, features.astype(np.float32), [1, 2, 3, 4, 5])
        rows = state.block([1, 2, 3, 4, 5, LAST], tiny.n_slots)
        assert rows is not None
        assert rows.confidences is not None
        assert [*rows.confidences.chances] == pytest.approx(wanted, abs=1e-5)
        others = [7, 300, 12]  # below tokens that are not on llama.cpp's chain
        for slot in range(1, tiny.n_slots):
            wanted = [tiny.confident(states[tiny.first + slot], token) for token in others]
            found = rows.after(slot, others).certainties
            assert found == pytest.approx(wanted, abs=1e-5)
            assert found != pytest.approx([rows.confidences.chances[slot]] * 3, abs=1e-2)
        cells.close()


@pytest.mark.parametrize("tiny", VARIANTS, ids=titled)
def test_the_best_chain_is_llama_cpps_own(tiny: TinyDFlash, target: Path, tmp_path: Path) -> None:
    """Its driver's drafts at temperature 0 (common/speculative.cpp), token for token."""
    random = np.random.default_rng(4)
    features = random.standard_normal((12, len(tiny.taps) * tiny.width)).astype(np.float32)
    with opened(tiny, target, tmp_path) as drafter:
        cells = drafter.cells(ContextOptions(**F32), tiny.n_slots)
        state = BlockState(cells)
        state.learn(0, features, [*range(12)])
        rows = state.block([*range(12), LAST], tiny.n_slots)
        assert rows is not None
        chain, before = list[int](), LAST
        for slot in range(tiny.n_slots):
            found = rows.after(slot, [before]).whole
            assert found is not None
            before = int(found[0].argmax())
            chain.append(before)
        cells.close()
        assert chain == driven(drafter, tiny, features)


def driven(drafter: BlockDrafter, tiny: TinyDFlash, features: Any) -> list[int]:
    """The drafts as llama.cpp's driver takes them from the outputs of its own context."""
    lender = Lender(drafter.target) if needs_lender(drafter.model) else None
    options = block_options(ContextOptions(**F32), tiny.block_size)
    context = BlockContext(drafter.model, options, lender, causal=tiny.causal)
    batch = context.feature_batch(features.shape[1])
    n = len(features)
    batch.fill_chain([0] * n, 0, [0], 0)
    batch.give(features)
    context.decode(batch)
    block = Batch(tiny.block_size, 1)
    block.fill_chain([LAST, *[tiny.mask] * (tiny.block_size - 1)], n, [0], tiny.block_size)
    rows = context.decode(block)
    chain, predecessor = list[int](), 0
    for slot in range(tiny.first, tiny.block_size):
        if tiny.generation != "dflash2":
            chain.append(int(rows.logits(slot).argmax()))
            continue
        row, k = rows.nextn_state(slot), tiny.top_k
        scores = row[k + predecessor * k :][:k]
        predecessor = int(scores.argmax())
        chain.append(int(row[predecessor]))
    context.close()
    if lender is not None:
        lender.close()
    return chain


def test_the_driver_sees_a_block_of_another_size(target: Path, tmp_path: Path) -> None:
    """The control: what a shorter block predicts is something else."""
    tiny = TinyDFlash(seed=5)
    features = np.random.default_rng(4).standard_normal((12, 64)).astype(np.float32)
    with opened(tiny, target, tmp_path) as drafter:
        whole = driven(drafter, tiny, features)
        assert driven(drafter, variant(tiny, block_size=4), features) != whole[:3]


def test_contexts_refuse_what_llama_cpp_would_assert(target: Path, tmp_path: Path) -> None:
    tiny = TinyDFlash()
    options = block_options(ContextOptions(**F32), tiny.block_size)
    with Model(target) as model, pytest.raises(UnsupportedModelError, match="no dflash drafter"):
        BlockContext(model, options, None, causal=False)
    with opened(tiny, target, tmp_path) as drafter:
        with pytest.raises(OptionError, match="lend them"):
            BlockContext(drafter.model, options, None, causal=False)
        with pytest.raises(UnsupportedModelError, match="left-to-right"):
            Context(drafter.model, options)
