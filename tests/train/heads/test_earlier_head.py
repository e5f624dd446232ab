"""A head that learns on from a file of another: it begins as that head was, and nothing less."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.training import head_run, stopped

from specrun.bindings.errors import OptionError, PairError, UnsupportedModelError
from specrun.convert.heads.head_conversion import convert_head
from specrun.convert.heads.target_facts import target_facts
from specrun.train.heads import (
    Eagle3Recipe,
    EagleRecipe,
    HeadRecipe,
    HeadRun,
    HydraRecipe,
    earlier_head,
)
from specrun.train.target.shape import target_shape
from specrun.train.trainer import train

EAGLES = {
    "eagle": EagleRecipe(),
    "eagle that drafts some": EagleRecipe(draft_tokens=150),
    "eagle3": Eagle3Recipe(steps=2, draft_tokens=150),
}


def run_of(taught, output: Path, **changes) -> HeadRun:
    return head_run(taught, output, **{"learning_rate": 5e-3, **changes})


@pytest.fixture(scope="module")
def heads(taught, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A trained head of each kind, as an F32 file beside its folder."""
    found = {}
    for name, recipe in EAGLES.items():
        report = train(recipe, run_of(taught, tmp_path_factory.mktemp("h") / "head"))
        found[name] = report.output.with_suffix(".gguf")
        convert_head(report.output, found[name], target=taught.gguf, outtype="f32")
    return found


def barely_taught(taught, output: Path, recipe: HeadRecipe, earlier: Path, **changes) -> Path:
    """Train for a step at no rate to speak of; return the folder."""
    run = run_of(taught, output, steps=1, learning_rate=1e-12, earlier=earlier, **changes)
    return train(recipe, run).output


@pytest.mark.parametrize("name", EAGLES)
def test_a_head_begins_as_the_one_in_the_file(
    taught, heads: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """All numbers are those of the file; float32 keeps them through EAGLE-3's scale and back.

    Settings that the head decides are its own: other draft tokens are asked for here.
    """
    recipe = {"eagle": EagleRecipe(), "eagle3": Eagle3Recipe(draft_tokens=99)}[EAGLES[name].kind]
    learnt = load_file(heads[name].with_suffix("") / "model.safetensors")
    again = load_file(
        barely_taught(taught, tmp_path / "on", recipe, heads[name]) / "model.safetensors"
    )
    assert set(again) == set(learnt)
    for tensor, numbers in learnt.items():
        torch.testing.assert_close(again[tensor], numbers, rtol=1e-5, atol=1e-6)
    card = (tmp_path / "on" / "README.md").read_text()
    assert heads[name].name in card


def test_rows_that_stay_in_llama_cpps_order_are_another_head(
    taught, heads: dict[str, Path], tmp_path: Path, monkeypatch
) -> None:
    """Negative control: queries and keys in the order of the file are not those of the folder."""
    monkeypatch.setattr(earlier_head, "in_halves", lambda matrix, n_heads: matrix)
    name = "midlayer.self_attn.q_proj.weight"
    learnt = load_file(heads["eagle3"].with_suffix("") / "model.safetensors")[name]
    folder = barely_taught(taught, tmp_path / "on", EAGLES["eagle3"], heads["eagle3"])
    again = load_file(folder / "model.safetensors")[name]
    assert not torch.allclose(again, learnt, rtol=1e-2, atol=1e-3)


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(
    taught, heads: dict[str, Path], tmp_path: Path
) -> None:
    """With the draft tokens of the earlier head, which are in no checkpoint of EAGLE's.

    Whole and in parts the head is the same; another head to begin with is another run.
    """
    name = "eagle that drafts some"
    recipe, settings = EAGLES[name], {"steps": 6, "tokens_per_batch": 100, "earlier": heads[name]}
    whole = train(recipe, run_of(taught, tmp_path / "whole", **settings))
    run = stopped(recipe, run_of(taught, tmp_path / "parts", **settings), 3)
    with pytest.raises(OptionError, match="was made with"):
        train(recipe, replace(run, earlier=None))
    rest = train(recipe, run)
    assert rest.result.resumed_at == 3
    first, other = (load_file(each.output / "model.safetensors") for each in (whole, rest))
    for tensor, numbers in first.items():
        torch.testing.assert_close(other[tensor], numbers, atol=1e-6, rtol=0)


def test_heads_that_cannot_be_learnt_on_from(
    taught, heads: dict[str, Path], tmp_path: Path
) -> None:
    eagle3, out = heads["eagle3"], tmp_path / "head"

    def refused(recipe: HeadRecipe, earlier: Path, error: type[Exception], problem: str) -> None:
        with pytest.raises(error, match=problem):
            train(recipe, run_of(taught, out, earlier=earlier))
        assert not out.exists()

    refused(EagleRecipe(), eagle3, UnsupportedModelError, "architecture eagle3: only eagle heads")
    refused(Eagle3Recipe(), taught.gguf, UnsupportedModelError, "architecture llama")
    refused(Eagle3Recipe(layers=(0, 1, 2)), eagle3, OptionError, r"\(0, 1, 2\) are to be read")
    refused(HydraRecipe(), heads["eagle"], OptionError, "hydra heads begin anew")


def test_a_head_of_another_target_is_refused(taught, heads: dict[str, Path]) -> None:
    """Told by vocabulary, sizes and positions, one at a time."""
    own, facts = target_shape(taught.folder), target_facts(taught.folder)

    def read(shape, facts=facts):
        return earlier_head.read_earlier_head(heads["eagle3"], "eagle3", shape, facts)

    assert read(own).taps
    with pytest.raises(PairError, match="another vocabulary"):
        read(own, replace(facts, fingerprint=b"another"))
    with pytest.raises(PairError, match="head_count"):
        read(replace(own, n_heads=2 * own.n_heads))
    with pytest.raises(PairError, match="embedding_length"):
        read(replace(own, hidden=2 * own.hidden))
    with pytest.raises(PairError, match="feed_forward_length"):
        read(replace(own, feed_forward=2 * own.feed_forward))
    with pytest.raises(UnsupportedModelError, match="turns positions"):
        read(replace(own, rope_theta=7.0))


def test_a_head_that_says_by_the_targets_output_matrix_is_refused(
    taught, heads: dict[str, Path], tmp_path: Path
) -> None:
    """Upstream's EAGLE-3 may leave its output matrix out; ours learns one."""
    folder = tmp_path / "without"
    shutil.copytree(heads["eagle3"].with_suffix(""), folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    file = tmp_path / "without.gguf"
    convert_head(folder, file, target=taught.gguf, outtype="f32", kind="eagle3")
    with pytest.raises(UnsupportedModelError, match="no output matrix of its own"):
        train(Eagle3Recipe(), run_of(taught, tmp_path / "on", earlier=file))
