"""PaSS and SPACE: states at look-ahead positions, their loss by definition, and whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.training import head_run

from specrun.bindings.errors import OptionError
from specrun.convert import convert_checkpoint
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime import Runtime, SamplingParams
from specrun.train.data.corpus import TokenCorpus
from specrun.train.heads.learner import FormerModel
from specrun.train.lookahead import (
    LookaheadLearner,
    PassRecipe,
    SpaceLearner,
    SpaceRecipe,
    lookahead_states,
    text_states,
)
from specrun.train.target.hf_model import HFModel, TargetMatrices, load_hf_model
from specrun.train.target.states import ModelFeatures
from specrun.train.trainer import train

CPU = torch.device("cpu")
EVERYWHERE = 999


@pytest.fixture
def model(taught: Any) -> HFModel:
    return load_hf_model(taught.folder, CPU)


@torch.no_grad()
def test_positions_with_the_texts_own_embeddings_have_its_states(
    model: HFModel, corpus: TokenCorpus
) -> None:
    ids = corpus.batch([0]).ids
    states, _ = text_states(model, ids)
    for places in ([3], [2, 5, 3]):  # groups that stood in one another's sight would differ
        _, cache = text_states(model, ids)
        for index, place in enumerate(places):
            _, cache = text_states(model, ids)
            embeddings = model.embedding[ids[0, place + 1 : place + 4]]
            found = lookahead_states(model, cache, ids.shape[1], torch.tensor([places]), embeddings)
            wanted = states[0, place + 1 : place + 4]
            assert torch.allclose(found[0, index], wanted, atol=1e-5)
            if len(places) > 1:  # behind another text the same embeddings say something else
                assert not torch.allclose(found[0, index - 1], wanted, atol=1e-3)


@torch.no_grad()
def loss_by_definition(learner: LookaheadLearner, model: HFModel, corpus: TokenCorpus) -> float:
    """Each group evaluated alone, as a text that ends with it."""
    batch = corpus.batch([0, 1])
    rows, total = learner.embeddings.rows(), 0.0
    for index in range(learner.recipe.count):
        terms = []
        for ids, learnt in zip(batch.ids, batch.learnt, strict=True):
            for place in range(len(ids) - 2 - index):
                # The tokens that are drafted there, and all before them behind the next.
                if not learnt[place + 2 : place + 3 + index].all():
                    continue
                text = model.embedding[ids[: place + 1]]
                whole = torch.cat((text, rows[: index + 1]))[None]
                logits = model.model(inputs_embeds=whole).logits[0, -1]
                terms.append(-logits.log_softmax(-1)[ids[place + 2 + index]].item())
        total += learner.recipe.decay**index * sum(terms) / len(terms)
    return total


@pytest.mark.parametrize("groups", [EVERYWHERE, 2])
def test_the_loss_is_that_of_every_group_alone(
    model: HFModel, corpus: TokenCorpus, groups: int
) -> None:
    torch.manual_seed(1)
    learner = LookaheadLearner(PassRecipe(count=3, groups=groups), model)
    parts = list(learner.losses(corpus.batch([0, 1]), torch.Generator().manual_seed(0), 0))
    wanted = loss_by_definition(learner, model, corpus)
    if groups == EVERYWHERE:
        assert parts[0].plain == pytest.approx(wanted, rel=1e-4)
    else:  # a draw of them, hence about as large and another number
        assert parts[0].plain != pytest.approx(wanted, rel=1e-4)
    parts[0].value.backward()
    assert learner.embeddings.weight.grad is not None
    assert all(each.grad is None for each in model.module.parameters())


def test_space_learns_the_model_too_and_its_own_law_is_no_loss(
    model: HFModel, corpus: TokenCorpus, taught: Any
) -> None:
    same = load_hf_model(taught.folder, CPU)
    matrices = TargetMatrices(same.embedding, same.output, None)
    recipe = SpaceRecipe(count=2, from_law=True, groups=EVERYWHERE)
    learner = SpaceLearner(recipe, model, FormerModel(ModelFeatures(same), matrices))
    assert learner.embeddings.weight.shape[0] == 1
    (part,) = learner.losses(corpus.batch([0, 1]), torch.Generator(), 0)
    # KL(p_before || p_now) before anything has changed; what masks learn remains.
    assert part.plain == pytest.approx(0.0, abs=1e-5)
    assert part.value.item() > 0.1
    part.value.backward()
    assert all(each.grad is not None for each in model.module.parameters())
    backbone, mask = learner.groups()
    assert (backbone.rate, mask.rate) == (1.0, recipe.mask_rate)


def test_a_run_of_pass_learns_and_drafts(taught: Any, tmp_path: Path) -> None:
    run = head_run(taught, tmp_path / "whole", learning_rate=0.05, steps=30)
    curve = train(PassRecipe(count=2), run).result.curves.losses
    assert curve[-1] < 0.8 * curve[0]
    target, file = tmp_path / "target.gguf", tmp_path / "pass.gguf"
    convert_checkpoint(taught.folder, target, outtype="f32")
    convert_head(tmp_path / "whole", file, target=target)
    greedy, question = SamplingParams(temperature=0.0), "What"
    with (
        Runtime(target, "none", n_ctx=64) as plain,
        Runtime(target, f"pass({file})", n_ctx=64) as fast,
    ):
        wanted, found = (each.generate(question, greedy, max_tokens=12) for each in (plain, fast))
    assert found.token_ids == wanted.token_ids
    assert found.stats.drafted > 0


def test_a_run_of_space_leaves_a_new_model_and_its_mask(taught: Any, tmp_path: Path) -> None:
    folder = tmp_path / "space"
    train(SpaceRecipe(count=2), head_run(taught, folder, learning_rate=1e-3, steps=4))
    tensors = load_file(folder / "model.safetensors")
    before = load_file(taught.folder / "model.safetensors")
    assert tensors.keys() - before.keys() == {"space_mask.weight"}
    assert any(not torch.equal(tensors[name], before[name]) for name in before)
    config = json.loads((folder / "config.json").read_text())
    assert (config["lookahead_kind"], config["lookahead_positions"]) == ("space", 2)
    target, file = tmp_path / "target.gguf", tmp_path / "mask.gguf"
    convert_checkpoint(folder, target, outtype="f32")
    convert_head(folder, file, target=target, kind="space")
    with Runtime(target, f"space({file})", n_ctx=64) as runtime:
        made = runtime.generate("What", SamplingParams(temperature=0.0), max_tokens=12)
    assert made.stats.drafted > 0


def test_settings_that_make_no_sense_are_refused(taught: Any, tmp_path: Path) -> None:
    for wrong in ({"count": 0}, {"groups": 0}, {"decay": 1.5}):
        with pytest.raises(OptionError):
            PassRecipe(**wrong)
    with pytest.raises(OptionError, match="weight and the rate of masks"):
        SpaceRecipe(mask_rate=0.0)
    run = head_run(taught, tmp_path / "x", teacher=tmp_path / "teacher.gguf")
    with pytest.raises(OptionError, match="leave out --teacher"):
        train(PassRecipe(), run)
