"""Block drafters: what training computes is what llama.cpp computes of the file."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.models import Model
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.train.data.corpus import TokenBatch, TokenCorpus, corpus_of
from specrun.train.data.tokens import TokenSequence
from specrun.train.heads import DFlashRecipe
from specrun.train.heads.dflash import Blocks, DFlashLearner
from specrun.train.heads.run import HeadFiles
from specrun.train.target.hf_model import load_hf_model
from specrun.train.target.shape import target_shape
from specrun.train.target.states import Features
from specrun.train.trainer.model_folder import write_json, write_weights

RECIPES = {
    "dflash": DFlashRecipe(block_size=5, layers=(0, 2)),
    "drafted": DFlashRecipe(block_size=4, n_layers=1, draft_tokens=90),
    "dspark": DFlashRecipe(block_size=5, markov_rank=32, confidence=True, layers=(3, 1, 2)),
    "dspark-drafted": DFlashRecipe(block_size=4, markov_rank=32, draft_tokens=90),
}


class Given:
    """States that were drawn once."""

    def __init__(self, final: torch.Tensor, taps: torch.Tensor) -> None:
        self.final, self.tapped, self.taps = final, taps, (0,)

    def features(self, batch: TokenBatch) -> Features:
        return Features(self.final, self.tapped)


def learner_of(recipe: DFlashRecipe, taught, given: Given, corpus: TokenCorpus) -> DFlashLearner:
    """A learner whose numbers are all drawn anew: zeros would hide mistakes."""
    matrices = load_hf_model(taught.folder, torch.device("cpu")).matrices
    torch.manual_seed(3)
    found = recipe.learner(target_shape(taught.folder), matrices, given, corpus)
    assert isinstance(found, DFlashLearner)
    for name, weights in found.head.named_parameters():
        low = 0.5 if "norm" in name else 0.0
        torch.nn.init.normal_(weights, mean=2 * low, std=0.3)
    return found


def batch_of(length: int, vocab: int = 400, learnt_from: int = 4) -> TokenBatch:
    ids = torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(3))
    learnt = torch.zeros(2, length, dtype=torch.bool)
    learnt[0, learnt_from:] = True
    learnt[1, 1 : length - 2] = True
    return TokenBatch((0, 1), ids, learnt, torch.ones_like(learnt))


def corpus(batch: TokenBatch) -> TokenCorpus:
    rows = zip(batch.ids.numpy(), batch.learnt.numpy(), strict=True)
    texts = [TokenSequence(ids.astype(np.int32), learnt) for ids, learnt in rows]
    return corpus_of(texts, held_out=0.0)


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_the_file_are_those_of_the_training(taught, tmp_path: Path, name: str) -> None:
    """To 1e-4 in F32, at anchors of two texts, after the tokens of the text; confidences, too."""
    recipe, batch, random = RECIPES[name], batch_of(12), torch.Generator().manual_seed(1)
    hidden, taps = 64, len(recipe.taps(target_shape(taught.folder)))
    states = torch.randn(2, 12, hidden * (1 + taps), generator=random)
    given = Given(states[..., :hidden], states[..., hidden:])
    learner = learner_of(recipe, taught, given, corpus(batch))
    shape = dataclasses.replace(target_shape(taught.folder), vocab_size=400)
    files = recipe.files(learner, shape)
    assert isinstance(files, HeadFiles)
    folder = tmp_path / "head"
    folder.mkdir()
    write_json(folder / "config.json", dict(files.config))
    write_weights(folder / "model.safetensors", files.tensors)
    file = tmp_path / "head.gguf"
    convert_head(folder, file, target=taught.gguf, outtype="f32")

    chosen = torch.zeros_like(batch.learnt)
    chosen[0, [3, 7]], chosen[1, 5] = True, True
    blocks = Blocks.at(chosen, batch.learnt, recipe.n_slots)
    with torch.no_grad():
        found = learner._states(batch, given.features(batch), blocks)
    with (
        Model(taught.gguf) as target,
        closing(BlockDrafter(file, target, n_threads=1)) as drafter,
        closing(drafter.cells(ContextOptions(**{**F32, "n_ctx": 64}), recipe.n_slots)) as cells,
    ):
        assert drafter.file.generation == ("DSpark" if recipe.markov_rank else "DFlash")
        for text, number, anchor in ((0, 0, 3), (0, 1, 7), (1, 0, 5)):
            tokens = batch.ids[text, : anchor + 1].tolist()
            state = BlockState(cells)
            state.begin(tokens)
            state.learn(0, given.tapped[text, :anchor].numpy(), tokens)
            rows = state.block(tokens, recipe.n_slots)
            assert rows is not None
            for slot in range(recipe.n_slots):
                before = batch.ids[text, min(anchor + slot, 11)]
                row = found[text, number, slot][None]
                with torch.no_grad():
                    wanted = learner.head.logits(row, before[None], learner.output)[0].numpy()
                whole = rows.after(slot, [int(before)]).whole
                assert whole is not None
                drafted = np.arange(400)
                if recipe.draft_tokens:
                    drafted = (learner.head.d2t + torch.arange(90)).numpy()
                    assert np.isneginf(np.delete(whole[0], drafted)).all()
                assert np.abs(whole[0][drafted] - wanted).max() < 1e-4
            if recipe.confidence:
                with torch.no_grad():
                    sure = learner.head.confidences(
                        found[text, number, :1], batch.ids[text, anchor][None]
                    )
                assert rows.confidences is not None
                assert rows.confidences.chances[0] == pytest.approx(float(sure.sigmoid()), abs=1e-4)
