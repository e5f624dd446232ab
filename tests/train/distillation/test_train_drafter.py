"""Whole runs: alpha rises, and does not where nothing is learnt; resumed runs; what others miss;
what is written."""

import dataclasses
import json
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from support.tiny_family import N_TEXTS
from support.training import order_of
from transformers import AutoModelForCausalLM

from specrun.bindings.errors import (
    FileMissingError,
    ModelError,
    OptionError,
    PairError,
)
from specrun.convert import convert_checkpoint
from specrun.runtime import Runtime, SamplingParams
from specrun.train.distillation import DistillationLoss, DrafterRecipe
from specrun.train.distillation.drafter import drafter_memory
from specrun.train.distillation.learner import DistillationLearner
from specrun.train.target.hf_model import load_hf_model

pytestmark = pytest.mark.long

SETTINGS = {
    "steps": 30, "learning_rate": 1e-2, "tokens_per_batch": 400, "measures": 2, "held_out": 0.3,
    "max_length": 64,
    "longest_answer": 16, "device": "cpu", "precision": "float32", "n_threads": 1,
}  # fmt: skip


def run_for(family, output, **changes):
    settings: dict[str, Any] = {
        "target": family.target,
        "draft": family.draft,
        "data": (family.data,),
        "output": output,
    }
    return order_of(DrafterRecipe, **{**settings, **SETTINGS, **changes})


@pytest.mark.parametrize(
    ("loss", "answers", "least"),
    [
        (DistillationLoss(), "given", 0.2),
        (DistillationLoss("reverse-kl", on_policy=1.0), "given", 0.1),
        (DistillationLoss("jensen-shannon", on_policy=0.5), "target", 0.1),
    ],
    ids=["fixed", "on-policy", "mixed"],
)
def test_alpha_rises_on_held_out_texts(family, tmp_path, loss, answers, least):
    found = run_for(family, tmp_path / "out", loss=loss, answers=answers).train()
    gain = found.acceptance
    assert gain.before.rate < 0.3
    assert gain.gain > least
    assert gain.gain > 3 * gain.error
    assert gain.before.n_texts == round(0.3 * N_TEXTS)
    assert not found.measured_on_training


def test_without_learning_alpha_stays(family, tmp_path):
    found = run_for(family, tmp_path / "out", learning_rate=1e-12).train()
    assert abs(found.acceptance.gain) < 1e-4


def test_the_folder_is_a_model_that_everything_reads(family, tmp_path):
    output = tmp_path / "out"
    found = run_for(family, output).train()
    names = {path.name for path in output.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert not [name for name in names if "partial" in name]
    assert AutoModelForCausalLM.from_pretrained(output).config.vocab_size == 300
    config, before = (
        json.loads((folder / "config.json").read_text()) for folder in (output, family.draft)
    )
    assert config == {**before, "torch_dtype": "float32"}
    again = run_for(dataclasses.replace(family, draft=output), tmp_path / "more", steps=1).train()
    assert again.acceptance.before == found.acceptance.after
    report = convert_checkpoint(output, tmp_path / "draft.gguf", outtype="f32", verify=True)
    assert report.logits.relative_error < 1e-4


def test_the_runtime_accepts_what_was_measured(family, tmp_path):
    """Greedy drafts at temperature 0 are accepted as often as the likeliest tokens are equal."""
    run_for(family, tmp_path / "out", steps=40, measured_on="given").train()
    for folder, name in (
        (family.target, "target"),
        (tmp_path / "out", "draft"),
        (family.draft, "untrained"),
    ):
        convert_checkpoint(folder, tmp_path / f"{name}.gguf", outtype="f32")
    lengths = {}
    for name in ("draft", "untrained"):
        expression = f"draft({tmp_path / f'{name}.gguf'}, n=3)"
        with Runtime(
            tmp_path / "target.gguf", drafter=expression, n_ctx=128, n_threads=1
        ) as runtime:
            asked = [{"role": "user", "content": "What does second do?"}]
            result = runtime.chat(asked, SamplingParams(temperature=0.0), max_tokens=24)
        lengths[name] = result.stats.mean_accepted_length
    assert lengths["draft"] > 2.0
    assert lengths["untrained"] < lengths["draft"] - 0.3


@pytest.fixture
def batches(monkeypatch):
    """The batches that were learnt from, as the drafter's own answers left them."""
    found = []
    written = DistillationLearner._with_own_answers

    def noted(learner, batch, noise):
        batch, own = written(learner, batch, noise)
        found.append(batch)
        return batch, own

    monkeypatch.setattr(DistillationLearner, "_with_own_answers", noted)
    return found


def prompts_of(family, path, copies):
    questions = sorted(
        {json.loads(line)["question"] for line in family.data.read_text().splitlines()}
    )
    path.write_text(
        "".join(json.dumps({"prompt": question}) + "\n" for question in questions * copies)
    )
    return dataclasses.replace(family, data=path)


def test_epochs_are_of_the_texts_that_are_learnt(family, tmp_path, batches):
    """Prompts of ten tokens become three times as long when they are answered: their epochs have
    more batches."""
    asked = prompts_of(family, tmp_path / "prompts.jsonl", 8)
    settings = {"answers": "target", "steps": None, "epochs": 2, "tokens_per_batch": 100}
    found = run_for(asked, tmp_path / "out", **settings).train()
    seen = Counter(number for batch in batches for number in batch.numbers)
    assert len(batches) == len(found.result.curves.losses)
    assert len(seen) == found.n_sequences
    assert set(seen.values()) == {2}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_batches_with_the_drafters_own_answers_are_as_large_as_asked(
    family, tmp_path, batches, share
):
    """40 tokens, for hardly anything ends an answer early: prompts of ten tokens become 5 times as
    long."""
    asked = prompts_of(family, tmp_path / "prompts.jsonl", 4)
    draft = load_hf_model(family.draft, torch.device("cpu"))
    with torch.no_grad():  # the last row is of the token that ends an answer
        draft.output[draft.model.config.eos_token_id] = 0.0
    silent = tmp_path / "silent"
    shutil.copytree(family.draft, silent)
    draft.module.save_pretrained(silent)
    loss = DistillationLoss(on_policy=share)
    answers = "given" if share == 1.0 else "target"
    settings = {
        "answers": answers,
        "loss": loss,
        "steps": None,
        "tokens_per_batch": 200,
        "longest_answer": 40,
    }
    run_for(
        dataclasses.replace(asked, draft=silent), tmp_path / "out", learning_rate=1e-9, **settings
    ).train()
    assert max(batch.ids.shape[1] for batch in batches) > 40
    assert all(batch.ids.numel() <= 200 for batch in batches)


def test_dropout_of_a_drafters_configuration_is_left_out(family, tmp_path):
    """It would draw from torch's own source, and no resumed run would be the one that was
    stopped."""
    dropping = tmp_path / "dropping"
    shutil.copytree(family.draft, dropping)
    config = json.loads((dropping / "config.json").read_text())
    (dropping / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    settings = {"steps": 4, "measured_on": "given", "measures": 4}
    plain = run_for(family, tmp_path / "plain", **settings).train()
    found = run_for(
        dataclasses.replace(family, draft=dropping), tmp_path / "out", **settings
    ).train()
    assert found.result.curves.losses == plain.result.curves.losses


def test_on_policy_runs_are_not_resumed_with_another_length(family, tmp_path):
    run = run_for(
        family, tmp_path / "out", steps=2, loss=DistillationLoss(on_policy=1.0), measured_on="given"
    )
    run.train()
    with pytest.raises(OptionError, match="max length 64, and --resume needs 60"):
        run.but(resume=True, max_length=60).train()


def test_a_run_is_not_resumed_as_another(family, tmp_path):
    run = run_for(family, tmp_path / "out", steps=2)
    run.train()
    other = "with loss divergence forward-kl, and --resume needs reverse-kl"
    with pytest.raises(OptionError, match=other):
        run.but(resume=True, loss=DistillationLoss("reverse-kl")).train()


def test_boosted_drafters_cover_more_together(family, tmp_path):
    """A drafter that knows some answers, and one trained on what it misses: the union knows what
    neither does alone.

    The negative control is a second drafter trained like the first, which adds next to nothing.
    """
    lines = family.data.read_text().splitlines(keepends=True)
    half = tmp_path / "half.jsonl"
    half.write_text("".join(line for line in lines if "first" in line or "second" in line))
    few = dataclasses.replace(family, data=half)
    settings = {"steps": 40, "held_out": 0.0, "measured_on": "given"}
    run_for(few, tmp_path / "first", **settings).train()
    convert_checkpoint(tmp_path / "first", tmp_path / "first.gguf", outtype="f32")
    boosted = {"not_covered_by": (tmp_path / "first.gguf",), **settings}
    found = run_for(family, tmp_path / "second", **boosted).train()
    alone = max(found.after.covered, found.after.same_top)
    assert 0.2 < found.before.covered < 0.8
    assert found.after.covered == found.before.covered
    assert found.after.covered_together > alone + 0.1
    assert found.after.covered_together > found.before.covered_together + 0.1
    # The control goes on learning the first one's texts, whether those are known or not.
    settings["loss"] = DistillationLoss(covered_weight=1.0)
    run_for(few, tmp_path / "control", **boosted).train()
    settings |= {"steps": 1, "learning_rate": 1e-12}
    measured = dataclasses.replace(family, draft=tmp_path / "control")
    same = run_for(
        measured, tmp_path / "measured", not_covered_by=boosted["not_covered_by"], **settings
    ).train()
    assert same.after.covered_together < found.after.covered_together - 0.1


def test_prompts_alone_will_do_where_models_answer(family, tmp_path):
    asked = prompts_of(family, tmp_path / "prompts.jsonl", 5)
    for loss, answers in (
        (DistillationLoss(on_policy=1.0), "given"),
        (DistillationLoss(), "target"),
    ):
        found = run_for(
            asked, tmp_path / answers, loss=loss, answers=answers, longest_answer=12, steps=25
        ).train()
        assert found.acceptance.gain > 0.1
    with pytest.raises(ModelError):
        run_for(asked, tmp_path / "given answers").train()


def test_plain_text_is_learnt_from(family, tmp_path):
    text = tmp_path / "text.txt"
    lines = [json.loads(line) for line in family.data.read_text().splitlines()]
    text.write_text(" ".join(f"{line['question']} {line['answer']}" for line in lines) * 4)
    found = run_for(
        dataclasses.replace(family, data=text),
        tmp_path / "out",
        loss=DistillationLoss(on_policy=0.5),
    ).train()
    assert found.acceptance.gain > 0.1


# -- bad input -------------------------------------------------------------------------------------


def test_other_vocabularies_are_refused_before_anything_is_written(family, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(family.draft, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = sorted(ids, key=ids.get)[270:272]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(PairError, match=f"token 270 is {first!r} for the target"):
        run_for(dataclasses.replace(family, draft=other), tmp_path / "out").train()
    assert not (tmp_path / "out").exists()


def test_missing_folders_and_files(family, tmp_path):
    for name in ("target", "draft"):
        lost = dataclasses.replace(family, **{name: tmp_path / "nowhere"})
        with pytest.raises(FileMissingError, match="there is no folder"):
            run_for(lost, tmp_path / "out").train()
    with pytest.raises(FileMissingError, match=r"there is no file .*none.jsonl to train on"):
        run_for(dataclasses.replace(family, data=tmp_path / "none.jsonl"), tmp_path / "out").train()
    with pytest.raises(OptionError, match="the folder of a model that is read"):
        run_for(family, family.draft).train()  # as the target's is, in test_one_run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": "oracle"}, "answers is 'oracle': use one of given, target"),
        ({"measured_at": -1.0}, "alpha cannot be measured at temperature -1"),
        ({"longest_answer": 0}, "answers of 0 tokens"),
        ({"held_out": 1.0}, "a held-out share of 1"),
    ],
)
def test_settings_out_of_range(family, tmp_path, changes, message):
    with pytest.raises(OptionError, match=message):
        run_for(family, tmp_path / "out", **changes)


def test_the_memory_named_grows_with_what_is_asked(family):
    small, large = (
        drafter_memory(family.target, family.draft, torch.float32, tokens_per_batch=n).total
        for n in (100, 1000)
    )
    assert 5 * small < large
    wide, narrow = (
        drafter_memory(family.target, family.draft, dtype, tokens_per_batch=100).parts
        for dtype in (torch.float32, torch.bfloat16)
    )
    module_of = load_hf_model(family.target, torch.device("cpu")).module
    n_parameters = sum(each.numel() for each in module_of.parameters())
    assert wide["target"] == 2 * narrow["target"] > 4 * n_parameters
