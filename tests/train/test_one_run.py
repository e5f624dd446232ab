"""`train`: every recipe goes through one run; a resumed run writes the bytes of a whole one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_targets import TaughtTarget, write_untaught
from support.training import SMALL_RUN, stopped

from specrun.bindings.errors import OptionError, OutOfMemoryError
from specrun.train.consistency import ConsistencyRecipe
from specrun.train.distillation import DistillationLoss, DrafterRecipe
from specrun.train.heads import (
    DFlashRecipe,
    Eagle3Recipe,
    EagleRecipe,
    HeadRun,
    HydraRecipe,
    Medusa2Recipe,
    MedusaRecipe,
)
from specrun.train.lookahead import PassRecipe, SpaceRecipe
from specrun.train.trainer import TrainingRun, train

pytestmark = pytest.mark.long

HEADS: dict[str, Any] = {
    "medusa": MedusaRecipe(heads=2),
    "medusa-2": Medusa2Recipe(MedusaRecipe(heads=2, from_law=True)),
    "hydra": HydraRecipe.plus_plus(heads=2),
    "eagle": EagleRecipe(steps=2, law_tokens=64),
    "eagle3": Eagle3Recipe(steps=2, layers=(0, 1, 3), draft_tokens=100, optimizer="muon"),
    "dflash": DFlashRecipe(
        block_size=4,
        n_layers=1,
        layers=(0, 1, 3),
        markov_rank=8,
        confidence=True,
        draft_tokens=100,
        law_tokens=40,
        optimizer="muon",
    ),
    "pass": PassRecipe(count=2),
    "space": SpaceRecipe(count=2, from_law=True),
}
KINDS = (*HEADS, "drafter", "consistency")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untaught drafter with the target's vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    write_untaught(folder, hidden_size=32, num_hidden_layers=1)
    return folder


def order(kind: str, taught: TaughtTarget, draft: Path, output: Path, **more: Any) -> Any:
    """A recipe of a kind, and a run of six small steps."""
    settings = {**SMALL_RUN, "steps": 6, "tokens_per_batch": 128, "held_out": 0.3, "measures": 2}
    run = TrainingRun if kind in ("drafter", "consistency") else HeadRun
    recipes = {
        **HEADS,
        "drafter": DrafterRecipe(
            draft=draft, loss=DistillationLoss(on_policy=0.5), answers="target", longest_answer=8
        ),
        "consistency": ConsistencyRecipe(block=3, form="local", answer_length=12),
    }
    places = {"target": taught.folder, "data": (taught.data,), "output": output}
    return recipes[kind], run(**{**places, **settings, **more})


def written(folder: Path) -> dict[str, bytes]:
    """The files of a finished model; its card has the seconds that it took."""
    paths = (path for path in folder.iterdir() if path.is_file() and path.name != "README.md")
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_writes_the_same_bytes(
    taught: TaughtTarget, draft: Path, tmp_path: Path, kind: str
) -> None:
    more = {"target": taught.gguf} if kind == "hydra" else {}
    whole = train(*order(kind, taught, draft, tmp_path / "whole", **more))
    recipe, run = order(kind, taught, draft, tmp_path / "cut", **more)
    run = stopped(recipe, run, 3)
    assert not any(name.endswith(".safetensors") for name in written(tmp_path / "cut"))
    rest = train(recipe, run)
    assert rest.result.resumed_at == 3
    assert rest.result.curves == whole.result.curves
    assert replace(rest, output=whole.output, result=whole.result) == whole
    assert written(tmp_path / "cut") == written(tmp_path / "whole")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_before_the_run_is_known_to_fit(
    taught: TaughtTarget, draft: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither into the folder of a model that is read, nor without memory, and no weights are
    loaded."""
    before = written(taught.folder)
    with pytest.raises(OptionError, match="is the folder of a model that is read"):
        train(*order(kind, taught, draft, taught.folder))
    assert written(taught.folder) == before
    monkeypatch.setattr("specrun.train.trainer.memory.free_memory", lambda device: 1000)
    loading = "transformers.AutoModelForCausalLM.from_pretrained"
    monkeypatch.setattr(loading, lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(OutOfMemoryError, match="training needs about"):
        train(*order(kind, taught, draft, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
