"""Every trainer, from data to a head that drafts: overfitted on six answers, converted, and run by
our own runtime."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_targets import ANSWERS, HIDDEN, write_untaught
from support.training import StopsAt, head_run, stopped

from specrun.bindings.errors import OptionError, PairError, SpecrunError
from specrun.convert import convert_checkpoint
from specrun.convert.heads.head_conversion import convert_head
from specrun.runtime import Runtime, SamplingParams
from specrun.train.heads import (
    DFlashRecipe,
    Eagle3Recipe,
    EagleRecipe,
    HydraRecipe,
    MedusaRecipe,
)
from specrun.train.heads import run as run_module
from specrun.train.target import states
from specrun.train.trainer import TrainingReport, settings, train
from specrun.train.trainer.trainer import earlier_run

pytestmark = pytest.mark.long

MEDUSA, EAGLE = MedusaRecipe(heads=3), EagleRecipe()


def tokens_a_round(taught, drafter: str) -> float:
    """Tokens per target evaluation over all questions, after checking that the text is plain
    decoding's own."""
    greedy = SamplingParams(temperature=0.0)
    options = {"n_threads": 1, "n_threads_batch": 1, "n_ctx": 256, "flash_attention": "off"}
    answers = {}
    with Runtime(taught.gguf, "none", **options) as plain:
        for question, answer in ANSWERS.items():
            answers[question] = plain.chat(
                [{"role": "user", "content": question}], greedy, max_tokens=60
            ).text
            assert answers[question] == answer  # the target has learnt it
    tokens = rounds = 0.0
    with Runtime(taught.gguf, drafter=drafter, **options) as runtime:
        for question, answer in answers.items():
            found = runtime.chat([{"role": "user", "content": question}], greedy, max_tokens=60)
            assert found.text == answer
            rounds += found.stats.rounds
            tokens += found.stats.rounds * found.stats.mean_accepted_length
    return tokens / rounds


@pytest.fixture(scope="module")
def medusa(taught, tmp_path_factory: pytest.TempPathFactory) -> TrainingReport:
    return train(
        MEDUSA,
        head_run(taught, tmp_path_factory.mktemp("m") / "heads", steps=60, learning_rate=1e-2),
    )


def test_medusa_heads_draft_what_they_have_learnt(
    taught, medusa: TrainingReport, tmp_path: Path
) -> None:
    """Three heads in a chain: 4 tokens a round at best; an answer's first round has no states to
    draft from."""
    assert medusa.result.curves.losses[-1] < 0.2 * medusa.result.curves.losses[0]
    gguf = tmp_path / "heads.gguf"
    convert_head(medusa.output, gguf, target=taught.gguf)
    assert tokens_a_round(taught, f"medusa({gguf}, tree=1x1x1)") > 2.5


def test_medusas_folder_is_upstreams(taught, medusa: TrainingReport) -> None:
    names = sorted(path.name for path in medusa.output.iterdir())
    assert names == ["README.md", "config.json", "medusa_lm_head.safetensors", "training"]
    kept = [path.name for path in (medusa.output / "training").iterdir()]
    assert kept == ["state.pt"]  # the cache is gone
    config = json.loads((medusa.output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert config["base_model_name_or_path"] == "target"
    tensors = load_file(medusa.output / "medusa_lm_head.safetensors")
    expected = {f"{i}.0.linear.{part}" for i in range(3) for part in ("weight", "bias")} | {
        f"{i}.1.weight" for i in range(3)
    }
    assert set(tensors) == expected
    assert tensors["2.1.weight"].shape == (400, HIDDEN)
    card = (medusa.output / "README.md").read_text()
    assert "medusa for target" in card
    assert "head 3 top-1" in card
    assert str(taught.folder.parent) not in card


def test_heads_may_share_the_targets_output(taught, tmp_path: Path) -> None:
    recipe = MedusaRecipe(heads=2, own_output=False, from_law=True)
    report = train(recipe, head_run(taught, tmp_path / "heads", steps=60, learning_rate=1e-2))
    assert set(load_file(report.output / "medusa_lm_head.safetensors")) == {
        f"{i}.0.linear.{part}" for i in range(2) for part in ("weight", "bias")
    }
    convert_head(report.output, tmp_path / "heads.gguf", target=taught.folder)
    assert tokens_a_round(taught, f"medusa({tmp_path / 'heads.gguf'}, tree=1x1)") > 1.4


def test_an_eagle_head_drafts_what_it_has_learnt(taught, tmp_path: Path) -> None:
    """A chain of four: 5 tokens a round at best."""
    report = train(EAGLE, head_run(taught, tmp_path / "head", steps=110, learning_rate=5e-3))
    config = json.loads((report.output / "config.json").read_text())
    sizes = ("num_hidden_layers", "bias", "num_key_value_heads")
    assert [config[name] for name in sizes] == [1, True, 2]
    tensors = load_file(report.output / "model.safetensors")
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert set(tensors) == {
        "fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{part}.weight" for part in parts),
        *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }  # fmt: skip
    convert_head(report.output, tmp_path / "head.gguf", target=taught.gguf)
    assert tokens_a_round(taught, f"eagle({tmp_path / 'head.gguf'}, n=4)") > 2.5


def test_an_eagle3_head_drafts_and_is_laid_out_as_upstreams(taught, tmp_path: Path) -> None:
    """A chain of four: 5 tokens a round at best."""
    recipe = Eagle3Recipe(steps=3, draft_tokens=150)
    report = train(recipe, head_run(taught, tmp_path / "head", steps=45, learning_rate=5e-3))
    measures = report.result.curves.measures[-1][1]
    assert measures["depth 1 top-1"] > 0.8
    assert measures["depth 3 top-1"] > 0.7
    assert measures["tokens a round"] > 2.5
    config = json.loads((report.output / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (150, 400)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    by_outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert by_outputs == [0, 1, 2]
    tensors = load_file(report.output / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes["fc.weight"] == (HIDDEN, 3 * HIDDEN)
    assert shapes["midlayer.self_attn.q_proj.weight"] == (HIDDEN, 2 * HIDDEN)
    assert shapes["lm_head.weight"] == (150, HIDDEN)
    norms = {f"midlayer.{name}.weight" for name in ("hidden_norm", "input_layernorm")}
    assert {*norms, "norm.weight", "t2d"} <= set(shapes)
    tokens = tensors["d2t"] + torch.arange(150)
    assert tensors["d2t"].dtype == torch.int64
    assert tokens.tolist() == sorted(set(tokens.tolist()))
    assert tensors["t2d"].nonzero().flatten().tolist() == tokens.tolist()
    convert_head(report.output, tmp_path / "head.gguf", target=taught.gguf, outtype="f32")
    assert tokens_a_round(taught, f"eagle3({tmp_path / 'head.gguf'}, n=4)") > 2.5


@pytest.mark.parametrize("markov_rank", [0, 32])
def test_a_block_drafter_drafts_and_is_laid_out_as_upstreams(
    taught, tmp_path: Path, markov_rank: int
) -> None:
    """Blocks of four: 4 tokens a round at best, 5 where the anchor's own place drafts."""
    recipe = DFlashRecipe(
        block_size=4,
        n_layers=1,
        anchor_every=1,
        markov_rank=markov_rank,
        confidence=markov_rank > 0,
        optimizer="muon",
    )
    report = train(recipe, head_run(taught, tmp_path / "block", steps=60, learning_rate=2e-2))
    measures = report.result.curves.measures[-1][1]
    assert measures["slot 1 top-1"] > 0.8
    assert measures["tokens a round"] > 2.5
    config = json.loads((report.output / "config.json").read_text())
    name = "Qwen3DSparkModel" if markov_rank else "DFlashDraftModel"
    assert config["architectures"] == [name]
    mask = config["mask_token_id"]
    assert config["dflash_config"] == {"mask_token_id": mask, "target_layer_ids": [0, 1, 2]}
    tensors = load_file(report.output / "model.safetensors")
    assert ("markov_head.markov_w1.weight" in tensors) is (markov_rank > 0)
    assert "lm_head.weight" not in tensors  # the target's
    assert tensors["layers.0.self_attn.q_norm.weight"].shape == (HIDDEN // 4,)
    convert_head(report.output, tmp_path / "block.gguf", target=taught.gguf, outtype="f32")
    assert tokens_a_round(taught, f"dflash({tmp_path / 'block.gguf'}, n=3)") > 2.5


@pytest.mark.parametrize(
    "recipe", [HydraRecipe(heads=2), HydraRecipe.plus_plus(heads=2, dropout=0.0)]
)
def test_hydra_heads_draft_and_are_laid_out_as_upstreams(
    taught, tmp_path: Path, recipe: HydraRecipe
) -> None:
    report = train(recipe, head_run(taught, tmp_path / "heads", steps=50, learning_rate=4e-3))
    measures = report.result.curves.measures[-1][1]
    assert measures["head 2 top-1"] > 0.8
    config = json.loads((report.output / "config.json").read_text())
    assert config["hydra_head_arch"] == ("prefix-mlp" if recipe.prefix else "mlp")
    tensors = load_file(report.output / "hydra_lm_head.safetensors")
    first, output = ("1", "0.1") if recipe.prefix else ("0", "0")
    assert tensors[f"hydra_mlp.1.{first}.linear.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors[f"hydra_lm_head.{output}.weight"].shape == (400, HIDDEN)
    assert (
        any(name.startswith("prefix_embeding_layer.layers.0.") for name in tensors) == recipe.prefix
    )
    convert_head(report.output, tmp_path / "heads.gguf", target=taught.gguf)
    assert tokens_a_round(taught, f"hydra({tmp_path / 'heads.gguf'}, n=2)") > 1.8


def test_a_quantized_teacher_trains_a_head_without_the_targets_weights(
    taught, medusa: TrainingReport, tmp_path: Path
) -> None:
    folder = tmp_path / "no weights"
    shutil.copytree(taught.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    places = {"target": folder, "teacher": taught.gguf}
    run = head_run(taught, tmp_path / "heads", steps=60, learning_rate=1e-2, **places)
    report = train(MEDUSA, run)
    # The same states but for rounding: the same curve.
    assert report.result.curves.losses == pytest.approx(
        medusa.result.curves.losses, rel=0.05, abs=0.02
    )
    assert "computed by llama.cpp" in (report.output / "README.md").read_text()


def test_a_named_folder_of_states_stays_and_serves_the_next_head(
    taught, tmp_path: Path, monkeypatch
) -> None:
    """Of other states, as EAGLE-3 reads them, there is a second cache beside the first."""
    states = tmp_path / "states"
    train(MEDUSA, head_run(taught, tmp_path / "a", steps=2, features=states))
    (chunk,) = states.glob("*/*.safetensors")
    before = chunk.stat().st_mtime_ns
    train(EAGLE, head_run(taught, tmp_path / "b", steps=2, features=states))
    assert list(states.glob("*/*.safetensors")) == [chunk]
    train(Eagle3Recipe(steps=2), head_run(taught, tmp_path / "c", steps=2, features=states))
    assert len(list(states.glob("*/*.safetensors"))) == 2
    assert chunk.stat().st_mtime_ns == before


def test_states_of_earlier_attempts_go_with_the_runs_own(taught, tmp_path: Path) -> None:
    stale = tmp_path / "heads" / "training" / "features" / "0123456789ab"
    stale.mkdir(parents=True)
    for name in ("manifest.json", "features-00000.safetensors"):
        (stale / name).write_text("{}")
    run = head_run(taught, tmp_path / "heads", steps=2)
    train(MEDUSA, run)
    assert [path.name for path in run.state_path.parent.iterdir()] == ["state.pt"]


# -- a resumed run does as before ------------------------------------------------------------------


def disk_with(monkeypatch, free: int) -> None:
    monkeypatch.setattr(
        states, "shutil", SimpleNamespace(disk_usage=lambda place: SimpleNamespace(free=free))
    )


@pytest.mark.parametrize("cache", ["auto", "yes"])
def test_states_that_are_there_need_no_room(
    taught, tmp_path: Path, monkeypatch, cache: str
) -> None:
    """The disk is full once they are written: a resumed run neither refuses nor computes them at
    each step."""
    whole = train(MEDUSA, head_run(taught, tmp_path / "whole", steps=4))
    run = stopped(MEDUSA, head_run(taught, tmp_path / "parts", steps=4, cache=cache))
    disk_with(monkeypatch, free=0)
    heard = StopsAt(9)
    rest = train(MEDUSA, run, heard)
    assert rest.result.curves.losses == pytest.approx(whole.result.curves.losses, abs=1e-6)
    assert any(
        re.search(r"kept on disk: (\S+) MiB in \S+, of which \1 are there", note)
        for note in heard.notes
    )


def test_a_run_without_room_for_states_goes_on_without_them(
    taught, tmp_path: Path, monkeypatch
) -> None:
    """Though the disk has room when it is resumed: the numbers would not be the same."""
    whole = train(MEDUSA, head_run(taught, tmp_path / "whole", steps=4, cache="no"))
    with monkeypatch.context() as full:
        disk_with(full, free=0)
        run = stopped(MEDUSA, head_run(taught, tmp_path / "parts", steps=4))
    rest = train(MEDUSA, run)
    assert rest.result.resumed_at == 2
    assert rest.result.curves.losses == pytest.approx(whole.result.curves.losses, abs=1e-6)
    with pytest.raises(OptionError, match="made with cached states False, and --resume needs True"):
        train(MEDUSA, replace(run, cache="yes"))


def test_a_resumed_run_goes_on_in_its_precision(taught, tmp_path: Path, monkeypatch) -> None:
    """A second trial that falls differently, as on a busy machine, decides nothing."""
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: 1.0)
    run = stopped(MEDUSA, head_run(taught, tmp_path / "heads", steps=4, precision="auto"))
    assert earlier_run(run.state_path, resume=True).precision == "float32"
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: 9.0)
    assert train(MEDUSA, run).precision == "float32"


def test_another_run_is_refused_before_states_are_computed(
    taught, tmp_path: Path, monkeypatch
) -> None:
    run = stopped(MEDUSA, head_run(taught, tmp_path / "heads", steps=4))
    kept = sorted(run.output.rglob("features-*"))
    assert kept
    monkeypatch.setattr(run_module.HeadTraining, "learner", None)
    with pytest.raises(OptionError, match=r"learning rate 0\.001, and --resume needs 0\.002"):
        train(MEDUSA, replace(run, learning_rate=2e-3))
    assert sorted(run.output.rglob("features-*")) == kept


# -- what cannot be --------------------------------------------------------------------------------


def test_an_earlier_run_is_not_overwritten(taught, medusa: TrainingReport, tmp_path: Path) -> None:
    run = head_run(taught, medusa.output, steps=60, learning_rate=1e-2)
    with pytest.raises(OptionError, match=r"already holds medusa_lm_head\.safetensors"):
        train(MEDUSA, run)
    with pytest.raises(OptionError, match=r"medusa decay 0\.8, and --resume needs 0\.9"):
        train(replace(MEDUSA, decay=0.9), replace(run, resume=True))
    output = tmp_path / "copy"
    shutil.copytree(medusa.output, output)
    forced = train(MEDUSA, head_run(taught, output, steps=2, force=True))
    assert len(forced.result.curves.losses) == 2


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_targets_own_folder_is_not_written_into(taught, tmp_path: Path, monkeypatch) -> None:
    """Nor under another name; with weights in several files no file of a head's name is there to
    notice."""
    target = tmp_path / "target"
    shutil.copytree(taught.folder, target)
    (target / "model.safetensors").rename(target / "model-00001-of-00001.safetensors")
    before = contents(target)
    (tmp_path / "link").symlink_to(target, target_is_directory=True)
    monkeypatch.setattr(run_module, "open_head_target", None)
    for output in (target, tmp_path / "link", target / ".." / "target"):
        for changes in ({}, {"force": True}, {"resume": True}):
            with pytest.raises(OptionError, match="a model that is read; name another folder"):
                train(MEDUSA, head_run(taught, output, target=target, **changes))
    assert contents(target) == before


@pytest.mark.parametrize("name", ["config.json", "README.md"])
def test_somebody_elses_folder_is_written_into_only_by_force(
    taught, tmp_path: Path, monkeypatch, name: str
) -> None:
    output = tmp_path / "other"
    output.mkdir()
    (output / name).write_text("{}")
    run = head_run(taught, output, steps=2)
    with (
        monkeypatch.context() as early,
        pytest.raises(OptionError, match=rf"holds {name} of something else.*--force"),
    ):
        early.setattr(run_module, "open_head_target", None)
        train(MEDUSA, run)
    assert contents(output) == {name: b"{}"}
    train(MEDUSA, replace(run, force=True))
    assert (output / name).read_text() != "{}"


def test_a_sibling_as_teacher_is_refused_before_any_work(
    taught, tmp_path: Path, monkeypatch
) -> None:
    """It has the target's vocabulary, and other sizes."""
    write_untaught(tmp_path / "sibling", hidden_size=32)
    convert_checkpoint(tmp_path / "sibling", tmp_path / "sibling.gguf", outtype="f16", verify=False)
    monkeypatch.setattr(run_module.HeadTraining, "texts", None)
    with pytest.raises(PairError, match="its states have 32 numbers"):
        train(MEDUSA, head_run(taught, tmp_path / "heads", teacher=tmp_path / "sibling.gguf"))
    assert not (tmp_path / "heads").exists()


def test_too_little_disk_computes_states_each_time_or_stops(
    taught, tmp_path: Path, monkeypatch
) -> None:
    disk_with(monkeypatch, free=0)
    heard = StopsAt(9)
    train(MEDUSA, head_run(taught, tmp_path / "heads", steps=3), heard)
    assert any("too much: computed at each step" in note for note in heard.notes)
    with pytest.raises(SpecrunError, match=r"0\.00 GiB are free"):
        train(MEDUSA, head_run(taught, tmp_path / "others", steps=3, cache="yes"))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"epochs": 0}, "0 epochs"),
        ({"held_out": 1.0}, "a held-out share of 1"),
        ({"warmup": 1.0}, "a warm-up of 1"),
    ],
)
def test_runs_that_cannot_be(taught, tmp_path: Path, wrong: dict, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        head_run(taught, tmp_path, **wrong)
