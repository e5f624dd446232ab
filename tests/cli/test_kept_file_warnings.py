"""Junk in what specrun keeps for itself: a warning that names the file, and the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.bindings import files
from specrun.bindings.contexts.context_options import ContextOptions
from specrun.runtime.planning import CostCurve, save_curve

from .conftest import Models, Run


@pytest.mark.parametrize("junk", ["Infinity", "-1", '"x"', "[" * 100_000])
def test_a_junk_curve_ends_no_answer(
    run: Run, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "_warned", set())
    curve = CostCurve((1, 77777), (0.01, 0.5), (0.01, 0.5), (0.0, 0.0))
    path = save_curve(curve, models.target, ContextOptions(n_ctx=256, n_threads=1), 0)
    path.write_text(path.read_text().replace("77777", junk))
    asked = ("generate", "-m", models.target, "-p", "hello", "-n", 8, "-c", 256, "-ngl", 0)
    result = run(*asked, "--drafter", "lookahead")
    assert result.exit_code == 0, result.stderr
    assert result.stdout
    warned = [line for line in result.stderr.splitlines() if line.startswith("Warning:")]
    assert len(warned) == 1
    assert str(path) in warned[0]
    assert "specrun tune" in warned[0]
