"""A converted file is compared with transformers' own logits, and one that computes something else
is not kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import llama_config, llama_tensors

from specrun.bindings.errors import SpecrunError
from specrun.convert import convert_checkpoint
from specrun.convert.families import steps

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # transformers' own


def checkpoint(write_checkpoint, **changes: Any) -> Path:
    config = llama_config(model_type="llama", **changes)
    return Path(write_checkpoint(config, llama_tensors(config)))


@pytest.mark.parametrize(("outtype", "allowed"), [("f32", 1e-4), ("f16", 2e-2), ("bf16", 1e-1)])
def test_logits_are_transformers_own(
    tmp_path: Path, write_checkpoint, outtype: str, allowed: float
) -> None:
    report = convert_checkpoint(
        checkpoint(write_checkpoint), tmp_path / "m.gguf", outtype=outtype, verify=True, n_threads=1
    )
    assert report.logits is not None
    assert report.logits.reason == ""
    assert report.logits.relative_error is not None
    assert 0 < report.logits.relative_error <= allowed == report.logits.largest_allowed
    assert report.logits.n_tokens == 64


def test_a_wrong_conversion_is_not_kept(tmp_path: Path, write_checkpoint, monkeypatch) -> None:
    folder = checkpoint(write_checkpoint)
    monkeypatch.setattr(steps, "interleave_halves", lambda array, heads: array)
    with pytest.raises(
        SpecrunError, match=r"the logits of the file are not the checkpoint's: off by .* for BF16"
    ):
        convert_checkpoint(folder, tmp_path / "m.gguf", outtype="bf16", verify=True, n_threads=1)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
    # Nothing else notices.
    assert convert_checkpoint(folder, tmp_path / "m.gguf", verify=False).logits is None


def test_small_models_are_compared_where_nothing_is_said(
    tmp_path: Path, write_checkpoint, monkeypatch
) -> None:
    folder = checkpoint(write_checkpoint)
    assert (
        convert_checkpoint(folder, tmp_path / "a.gguf", verify=None, n_threads=1).logits is not None
    )
    monkeypatch.setattr("specrun.convert.conversion.SMALL_MODEL", 1000)
    assert convert_checkpoint(folder, tmp_path / "b.gguf", verify=None, n_threads=1).logits is None


def test_without_transformers_the_report_says_so(
    tmp_path: Path, write_checkpoint, monkeypatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    report = convert_checkpoint(checkpoint(write_checkpoint), tmp_path / "m.gguf", verify=True)
    assert report.logits is not None
    assert (report.logits.relative_error, report.logits.reason) == (
        None,
        "transformers is not installed",
    )


def test_what_transformers_cannot_open_is_not_compared(tmp_path: Path, write_checkpoint) -> None:
    folder = checkpoint(write_checkpoint)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        text.replace('"model_type": "llama"', '"model_type": "nonsense"')
    )
    report = convert_checkpoint(folder, tmp_path / "m.gguf", verify=True)
    assert report.logits is not None
    assert "transformers cannot open the checkpoint" in report.logits.reason
    assert report.output.exists()
