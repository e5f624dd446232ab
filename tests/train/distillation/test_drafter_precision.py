"""In which precision a drafter's run goes on, and what folder it does not write into."""

from __future__ import annotations

import pytest
from support.training import Order, order_of

from specrun.bindings.errors import OptionError
from specrun.train.distillation import DrafterRecipe
from specrun.train.trainer import settings
from specrun.train.trainer.learner import SilentListener


def run_for(family, output) -> Order:
    return order_of(
        DrafterRecipe, target=family.target, data=(family.data,), output=output, steps=3,
        tokens_per_batch=400, max_length=64,
        held_out=0.1, device="cpu",
        n_threads=1, draft=family.draft, measured_on="given",
    )  # fmt: skip


class Stops(SilentListener):
    def status(self, status) -> None:
        if status.step == 2:
            raise KeyboardInterrupt


def test_a_resumed_run_goes_on_in_its_precision(family, tmp_path, monkeypatch) -> None:
    """A second trial that falls differently, as on a busy machine, decides nothing."""
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: 1.0)
    run = run_for(family, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run.train(Stops())
    monkeypatch.setattr(settings, "bfloat16_gain", lambda device, threads: 9.0)
    assert run.but(resume=True).train().precision == "float32"


def test_somebody_elses_folder_is_written_into_only_by_force(family, tmp_path) -> None:
    output = tmp_path / "other"
    output.mkdir()
    (output / "config.json").write_text("{}")
    with pytest.raises(OptionError, match=r"holds config\.json of something else; .* --force"):
        run_for(family, output).train()
    assert (output / "config.json").read_text() == "{}"
