"""Block drafters: what training computes is what llama.cpp computes of the file."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.tiny_models import F32

from specrun.bindings.contexts import ContextOptions
from specrun.bindings.errors import OptionError
from specrun.bindings.models import Model
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime.drafters.dflash.drafter import BlockDrafter
from specrun.runtime.drafters.dflash.source import BlockState
from specrun.train.data.corpus import TokenBatch, TokenCorpus, corpus_of
from specrun.train.data.tokens import TokenSequence
from specrun.train.heads import DFlashRecipe
from specrun.train.heads.dflash import Blocks, DFlashLearner, rarest_token
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


# -- the loss --------------------------------------------------------------------------------------


def test_the_loss_is_that_of_each_block_alone(taught) -> None:
    """With every anchor: each block is computed from the text before it, slot by slot.

    Slots count while the model said all tokens of the block, and weigh 0.5 to the power of their
    depth; the confidence head learns 1 - TV.
    """
    recipe = DFlashRecipe(
        block_size=3,
        n_layers=1,
        layers=(1,),
        anchor_every=1,
        slot_decay=0.5,
        markov_rank=8,
        confidence=True,
    )
    batch, random = batch_of(10), torch.Generator().manual_seed(1)
    states = torch.randn(2, 10, 128, generator=random)
    given = Given(states[..., :64], states[..., 64:])
    learner = learner_of(recipe, taught, given, corpus(batch))
    [part] = learner.losses(batch, torch.Generator().manual_seed(2), 0)
    matrices, total, weighed, plain = learner._target, 0.0, 0.0, list[float]()
    with torch.no_grad():
        for text in range(2):
            for anchor in range(1, 9):
                if not batch.learnt[text, anchor + 1]:
                    continue
                tokens = torch.tensor([int(batch.ids[text, anchor]), learner.mask, learner.mask])
                block = learner.head(
                    matrices.embedding[tokens][None, None],
                    given.tapped[text : text + 1, :anchor],
                    torch.tensor([[anchor]]),
                )[0, 0]
                for slot in range(3):
                    label = anchor + 1 + slot
                    if label > 9 or not batch.learnt[text, label]:
                        break
                    before = batch.ids[text, label - 1][None]
                    logits = learner.head.logits(block[slot][None], before, learner.output)[0]
                    law = matrices.law(given.final[text, label - 1])
                    loss = -float((law * logits.log_softmax(-1)).sum())
                    accepted = 1 - 0.5 * (law - logits.softmax(-1)).abs().sum()
                    sure = learner.head.confidences(block[slot][None], before)[0]
                    loss_of_sure = float(F.binary_cross_entropy_with_logits(sure, accepted))
                    total += 0.5**slot * (loss + loss_of_sure)
                    weighed += 0.5**slot
                    plain.append(loss)
    assert len(plain) > 20
    assert part.value.item() == pytest.approx(total / weighed, rel=1e-4)
    assert part.plain == pytest.approx(np.mean(plain), rel=1e-4)


def test_anchors_are_drawn_anew_and_a_share_of_those_possible(taught) -> None:
    batch = batch_of(12)
    given = Given(torch.zeros(2, 12, 64), torch.zeros(2, 12, 64))
    recipe = DFlashRecipe(block_size=3, anchor_every=3, layers=(1,))
    learner = learner_of(recipe, taught, given, corpus(batch))
    seen = set[int]()
    for seed in range(30):
        blocks = learner._drawn(batch.learnt, torch.Generator().manual_seed(seed))
        assert blocks.kept.sum(-1).tolist() == [3, 3]  # of 8, and of 8
        found = blocks.anchors[0][blocks.kept[0]].tolist()
        assert found == sorted(set(found))
        seen |= set(found)
    assert seen == set(range(3, 11))  # the prompt's last token, too


@pytest.mark.parametrize("draft_tokens", [0, 90])
def test_a_target_in_bfloat16_is_measured(taught, draft_tokens: int) -> None:
    """As on machines that multiply so faster: its matrices are, and states are not."""
    batch = batch_of(12)
    states = torch.randn(2, 12, 128, generator=torch.Generator().manual_seed(1))
    given = Given(states[..., :64], states[..., 64:])
    recipe = DFlashRecipe(block_size=4, layers=(1,), markov_rank=8, draft_tokens=draft_tokens)
    learner = learner_of(recipe, taught, given, corpus(batch))
    wanted = learner.measure([batch])
    half = {name: getattr(learner._target, name).bfloat16() for name in ("embedding", "output")}
    learner._target = dataclasses.replace(learner._target, **half)
    learner.output = learner._target.output
    assert learner.measure([batch]).keys() == wanted.keys()
    with torch.autocast("cpu", torch.bfloat16):
        [part] = learner.losses(batch, torch.Generator().manual_seed(2), 0)
    part.value.backward()
    assert torch.isfinite(part.value)


def test_the_mask_is_the_token_said_least_often_that_has_an_embedding() -> None:
    texts = [TokenSequence(np.array([0, 1, 2, 2, 5], np.int32), np.ones(5, np.bool_))]
    embedding = torch.ones(7, 3)
    assert rarest_token(corpus_of(texts, held_out=0.0), embedding) == 6
    embedding[4:] = 0.0
    assert rarest_token(corpus_of(texts, held_out=0.0), embedding) == 3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"block_size": 1}, "a block of 1 tokens: give 2 to 256"),
        ({"confidence": True}, "needs a Markov head"),
        ({"slot_decay": 0.0}, "a slot decay of 0"),
        ({"n_layers": 0}, "no layers or no anchors"),
    ],
)
def test_what_is_refused(given: dict[str, float], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        DFlashRecipe(**given)  # type: ignore[arg-type]


def test_a_mask_or_layer_that_the_target_lacks_is_refused(taught) -> None:
    batch = batch_of(8)
    given = Given(torch.zeros(2, 8, 64), torch.zeros(2, 8, 64))
    with pytest.raises(OptionError, match="token 400 is to be the mask, and the target has 400"):
        learner_of(DFlashRecipe(mask=400, layers=(1,)), taught, given, corpus(batch))
    with pytest.raises(OptionError, match="layer 4 is to be read, and the target has layers 0 to"):
        learner_of(DFlashRecipe(layers=(4,)), taught, given, corpus(batch))
