"""Medusa-2: the joint loss in closed form, who learns when, and a folder that is model and heads at
once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_targets import HIDDEN, write_untaught
from support.training import head_run, stopped

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.convert import convert_checkpoint
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime import Runtime, SamplingParams
from specrun.train.data.corpus import TokenCorpus
from specrun.train.heads import HeadRun, Medusa2Recipe, MedusaRecipe
from specrun.train.heads.learner import FormerModel
from specrun.train.heads.medusa import Medusa2Learner
from specrun.train.target import states
from specrun.train.target.hf_model import TargetMatrices, load_hf_model
from specrun.train.target.shape import target_shape
from specrun.train.target.states import ModelFeatures
from specrun.train.trainer import train

CPU = torch.device("cpu")
RECIPE = Medusa2Recipe(MedusaRecipe(heads=2), heads_alone=0.5)


def joint_run(taught, output: Path, **changes) -> HeadRun:
    return head_run(taught, output, **{"learning_rate": 1e-2, **changes})


def test_the_joint_loss_is_the_models_and_a_fifth_of_the_heads(taught, corpus: TokenCorpus) -> None:
    """Untrained heads have the model's own logits, so all terms come from one matrix of
    log-probabilities."""
    model = load_hf_model(taught.folder, CPU)
    learner = Medusa2Learner(RECIPE, target_shape(taught.folder), model, steps=10)
    batch = corpus.batch([0, 1])
    with torch.no_grad():
        log_probs = model.model(input_ids=batch.ids).logits.log_softmax(-1)
    expected = 0.0
    for ahead, weight in ((0, 1.0), (1, 0.2 * 0.8), (2, 0.2 * 0.8**2)):
        terms = [
            -log_probs[row, t, batch.ids[row, t + 1 + ahead]].item()
            for row in range(2)
            for t in range(batch.ids.shape[1] - 1 - ahead)
            if batch.learnt[row, t + min(2, 1 + ahead) : t + 2 + ahead].all()
        ]
        expected += weight * sum(terms) / len(terms)
    (part,) = learner.losses(batch, torch.Generator(), 5)
    assert part.value.item() == pytest.approx(expected, rel=1e-4)
    part.value.backward()
    assert all(parameter.grad is not None for parameter in model.module.parameters())


def test_heads_warm_up_alone(taught, corpus: TokenCorpus) -> None:
    model = load_hf_model(taught.folder, CPU)
    learner = Medusa2Learner(RECIPE, target_shape(taught.folder), model, steps=10)
    assert learner.first_joint_step == 5
    (part,) = learner.losses(corpus.batch([0]), torch.Generator(), 4)
    part.value.backward()
    assert part.name == "heads"
    assert all(parameter.grad is None for parameter in model.module.parameters())
    heads, backbone = learner.groups()
    assert (heads.rate, heads.starts_at) == (1.0, 0)
    assert (backbone.rate, backbone.starts_at) == (0.25, 5)


def test_self_distillation_begins_at_no_divergence_from_itself(taught, corpus: TokenCorpus) -> None:
    """KL(p_before || p_now) is 0 before the model has changed, and the heads' part remains."""
    model, same = (load_hf_model(taught.folder, CPU) for _ in range(2))
    matrices = TargetMatrices(same.embedding, same.output, None)
    recipe = replace(RECIPE, heads=MedusaRecipe(heads=2, from_law=True))
    learner = Medusa2Learner(
        recipe, target_shape(taught.folder), model, 10, FormerModel(ModelFeatures(same), matrices)
    )
    (part,) = learner.losses(corpus.batch([0, 1]), torch.Generator(), 9)
    assert part.plain == pytest.approx(0.0, abs=1e-5)
    assert part.value.item() > 0.1


def test_a_model_and_its_heads_are_one_folder_and_draft(taught, tmp_path: Path) -> None:
    recipe = replace(RECIPE, model_rate=0.05)
    report = train(recipe, joint_run(taught, tmp_path / "both", steps=60))
    measures = report.result.curves.measures[-1][1]
    assert measures["head 2 top-1"] > 0.7
    assert measures["model loss"] < 0.2
    tensors = load_file(report.output / "model.safetensors")
    assert {
        "medusa_head.0.0.linear.weight",
        "medusa_head.1.1.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= set(tensors)
    assert tensors["medusa_head.1.1.weight"].shape == (400, HIDDEN)
    config = json.loads((report.output / "config.json").read_text())
    assert (config["architectures"], config["medusa_num_heads"]) == (["LlamaForCausalLM"], 2)
    before = load_file(taught.folder / "model.safetensors")
    assert not torch.equal(before["model.norm.weight"], tensors["model.norm.weight"])
    assert [path.name for path in (report.output / "training").iterdir()] == ["state.pt"]
    # The same folder becomes a target and its heads.
    convert_head(report.output, tmp_path / "heads.gguf", target=report.output, kind="medusa")
    convert_checkpoint(report.output, tmp_path / "target.gguf", outtype="f32", verify=False)
    drafter = f"medusa({tmp_path / 'heads.gguf'}, tree=1x1)"
    with Runtime(
        tmp_path / "target.gguf", drafter=drafter, n_ctx=256, n_threads=1, n_threads_batch=1
    ) as runtime:
        result = runtime.chat(
            [{"role": "user", "content": "first?"}], SamplingParams(temperature=0.0), max_tokens=40
        )
    assert result.stats.mean_accepted_length > 1.6


def test_states_that_are_there_need_no_room(taught, tmp_path: Path, monkeypatch) -> None:
    recipe = replace(RECIPE, heads=MedusaRecipe(heads=2, from_law=True))
    run = stopped(recipe, joint_run(taught, tmp_path / "both", steps=4))
    full = SimpleNamespace(disk_usage=lambda place: SimpleNamespace(free=0))
    monkeypatch.setattr(states, "shutil", full)
    assert train(recipe, run).result.resumed_at == 2
    assert not (run.output / "training" / "features").exists()
    with pytest.raises(SpecrunError, match=r"needs 0\.00 GiB in .* and 0\.00 GiB are free"):
        train(recipe, joint_run(taught, tmp_path / "others", steps=4))


def test_tied_models_keep_one_matrix(taught, tmp_path: Path) -> None:
    write_untaught(tmp_path / "tied", tie_word_embeddings=True)
    run = replace(joint_run(taught, tmp_path / "both", steps=2), target=tmp_path / "tied")
    tensors = load_file(train(RECIPE, run).output / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert "model.embed_tokens.weight" in tensors


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Medusa2Recipe(MedusaRecipe(own_output=False)), "leave out --shared-output"),
        (lambda: Medusa2Recipe(MedusaRecipe(), head_weight=0.0), "the weight of the heads"),
        (lambda: Medusa2Recipe(MedusaRecipe(), heads_alone=1.0), "heads alone for 1 of the steps"),
    ],
)
def test_recipes_that_cannot_be(make, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        make()


def test_a_teacher_cannot_be_trained(taught, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="leave out --teacher"):
        train(RECIPE, joint_run(taught, tmp_path / "x", teacher=taught.gguf))
