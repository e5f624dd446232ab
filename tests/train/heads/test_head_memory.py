"""What a run of heads needs, by its estimate, against what a step allocates; and what is said where
it does not fit."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_targets import HIDDEN, LAYERS
from torch.profiler import ProfilerActivity, profile

from specrun.bindings.errors import OutOfMemoryError
from specrun.train.data import AnswerSettings
from specrun.train.data.corpus import TokenBatch, TokenCorpus, corpus_of
from specrun.train.data.tokens import TokenSequence
from specrun.train.heads import (
    Eagle3Recipe,
    EagleRecipe,
    HeadRecipe,
    HeadRun,
    HydraRecipe,
    Medusa2Recipe,
    MedusaRecipe,
)
from specrun.train.heads import run as head_run
from specrun.train.target import head_target, open_head_target
from specrun.train.target.hf_model import TargetMatrices
from specrun.train.target.shape import ModelShape, target_shape
from specrun.train.target.states import Features
from specrun.train.trainer import memory, train
from specrun.train.trainer.memory import MemoryNeed, require_memory
from specrun.train.trainer.settings import TrainerSettings, device_name

CPU = torch.device("cpu")
LENGTH, ROWS = 48, 4
PLUS = HydraRecipe.plus_plus()


class SomeStates:
    """States that are made anew for each batch."""

    def __init__(self, hidden: int) -> None:
        self.hidden, self.taps = hidden, ()

    def features(self, batch: TokenBatch) -> Features:
        return Features(torch.randn(*batch.ids.shape, self.hidden), None)


def allocated(recipe: HeadRecipe, vocab_size: int, hidden: int) -> tuple[int, int]:
    """Return the most bytes that a step's losses and gradients hold at a time, weights aside, and
    the estimate."""
    sizes = {"hidden": hidden, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4}
    shape = ModelShape(**sizes, feed_forward=2 * hidden, vocab_size=vocab_size)
    torch.manual_seed(0)
    matrix = torch.randn(vocab_size, hidden) / hidden**0.5
    ids = np.random.default_rng(0).integers(0, vocab_size, LENGTH).astype(np.int32)
    corpus = corpus_of([TokenSequence(ids, np.ones(LENGTH, np.bool_))] * ROWS, held_out=0.0)
    learner = recipe.learner(
        shape, TargetMatrices(matrix, matrix, None), SomeStates(hidden), corpus
    )
    batch = corpus.batch(range(ROWS))

    def step() -> None:
        for part in learner.losses(batch, torch.Generator().manual_seed(0), 0):
            part.value.backward()

    step()  # now there are gradients to add to
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = np.cumsum(
        [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    )
    return int(held.max()), recipe.activation_bytes(shape, ROWS * LENGTH, LENGTH, recompute=True)


@pytest.mark.parametrize(
    "recipe",
    [
        PLUS,
        replace(PLUS, dropout=0.0),
        replace(PLUS, token_weight=0.5),
        HydraRecipe(),
        MedusaRecipe(from_law=True),
    ],
    ids=["plus", "plus without dropout", "plus with both losses", "hydra", "medusa"],
)
@pytest.mark.parametrize(
    ("vocab_size", "hidden"), [(4000, 16), (200, 128)], ids=["words", "states"]
)
def test_an_estimate_is_at_least_what_a_step_allocates(
    recipe: HeadRecipe, vocab_size: int, hidden: int
) -> None:
    """Wide vocabularies and wide states apart, so that one does not hide what is missed of the
    other."""
    held, estimated = allocated(recipe, vocab_size, hidden)
    assert held <= estimated
    if vocab_size > hidden * 100:
        assert estimated < 1.6 * held


SHAPE_8B = ModelShape(
    **{"hidden": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "feed_forward": 14336},
    max_positions=4096,
    vocab_size=128_256,
)


def test_hydras_losses_are_estimated_together_with_plus() -> None:
    """4096 tokens and 128k tokens: laws and logarithms of four heads, and three more, of 2.1 GB
    each."""
    rows = 4 * 4096 * 128_256
    plus, plain = (
        recipe.activation_bytes(SHAPE_8B, 4096, 2048, recompute=True) / rows
        for recipe in (PLUS, HydraRecipe())
    )
    assert 11 < plus < 16
    assert 4 < plain < 7


# -- what is said ----------------------------------------------------------------------------------


def test_what_helps_is_named_by_what_is_largest() -> None:
    remedies = {
        "target": "use a --teacher",
        "head": "use fewer --heads",
        "a step": "lower --batch-tokens",
    }
    need = MemoryNeed({"target": 2 << 30, "head": 40 << 30, "a step": 10 << 30}, remedies)
    for free, advice in {
        52 << 30: "use fewer --heads",
        15 << 30: "use fewer --heads",
        13 << 30: "use fewer --heads; lower --batch-tokens",
        1 << 30: "use fewer --heads; lower --batch-tokens; use a --teacher",
    }.items():
        with pytest.raises(OutOfMemoryError) as caught:
            require_memory(need, CPU, free=free)
        assert str(caught.value).endswith(f"GiB are free: {advice}")


def needed(taught, recipe: HeadRecipe, shape: ModelShape, corpus: TokenCorpus) -> MemoryNeed:
    """The memory of heads with a teacher, by shapes alone."""
    target = open_head_target(taught.folder, taught.gguf, device=CPU)
    settings = TrainerSettings(1, 1e-3, tokens_per_batch=4096)
    return head_run.head_memory(recipe, target, shape, corpus, settings, True, recompute=True)


def texts_of(length: int) -> TokenCorpus:
    return corpus_of([TokenSequence(np.zeros(length, np.int32), np.ones(length, np.bool_))] * 64)


def test_heads_that_are_too_large_are_told_to_share_the_output(taught) -> None:
    """Five Medusa heads with matrices of their own for an 8B with a vocabulary of 128k tokens: 42
    GiB, on a GPU of 24."""
    need = functools.partial(needed, taught, shape=SHAPE_8B, corpus=texts_of(2048))
    free = 24 << 30
    assert need(MedusaRecipe()).parts["head"] > 40 << 30
    assert need(MedusaRecipe()).remedy(free) == "use --shared-output or fewer --heads"
    assert need(MedusaRecipe(own_output=False)).total < free
    for recipe, option in [
        (HydraRecipe(), "--heads"),
        (EagleRecipe(), "--batch-tokens"),
        (Eagle3Recipe(), "--draft"),
    ]:
        assert option in need(recipe).remedy(1 << 30)


@pytest.mark.parametrize(
    "recipe",
    [MedusaRecipe(), EagleRecipe(), Eagle3Recipe(), HydraRecipe()],
    ids=lambda value: value.kind,
)
def test_a_head_for_7b_fits_24_gib_with_a_teacher(taught, recipe: HeadRecipe) -> None:
    """By the estimate, for Llama-2-7B's sizes and the usual batch; nothing is allocated."""
    shape = replace(SHAPE_8B, n_kv_heads=32, feed_forward=11008, vocab_size=32000)
    assert 4 << 30 < needed(taught, recipe, shape, texts_of(2048)).total < 24 << 30


def test_estimates_are_of_the_right_size(taught) -> None:
    """The head and its optimizer to the byte; the target's weights as stored."""
    recipe, shape, corpus = MedusaRecipe(heads=3), target_shape(taught.folder), texts_of(64)
    target, settings = open_head_target(taught.folder, None, device=CPU), TrainerSettings(1, 1e-3)
    need = head_run.head_memory(recipe, target, shape, corpus, settings, False, recompute=True)
    assert need.parts["head"] == 4 * 4 * 3 * (HIDDEN * HIDDEN + HIDDEN + 400 * HIDDEN)
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * 128 + 2 * HIDDEN
    assert need.parts["target"] == 4 * (2 * 400 * HIDDEN + LAYERS * layer + HIDDEN)
    assert set(need.parts) == {"target", "head", "a step"}


@pytest.mark.parametrize("joint", [False, True])
def test_what_cannot_be_learnt_is_not_answered(
    taught, tmp_path: Path, monkeypatch, joint: bool
) -> None:
    """The target's answers may take hours: whether there is memory for what follows is found
    before."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1 << 20)
    monkeypatch.setattr(
        head_target, "runnable_target", lambda *_: pytest.fail("the target was asked")
    )
    monkeypatch.setattr(head_run, "load_hf_model", None)
    run = HeadRun(
        taught.folder, (taught.data,), tmp_path / "heads",
        own_answers=AnswerSettings(), max_length=128, device="cpu", precision="float32",
    )  # fmt: skip
    recipe = MedusaRecipe(heads=2)
    with pytest.raises(OutOfMemoryError, match="training needs about"):
        if joint:
            train(Medusa2Recipe(recipe), run)
        else:
            train(recipe, run)
    assert not (tmp_path / "heads").exists()


def test_the_gpu_that_computes_is_named(monkeypatch) -> None:
    names = {0: "first", 1: "second"}
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=None: names[device.index if device else 0]
    )
    assert device_name(torch.device("cuda:1")) == "second"
    assert device_name(CPU) == "CPU"
