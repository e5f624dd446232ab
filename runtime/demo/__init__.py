"""The embedded demo family: a target and its drafters, trained by this project on the standard
library's docstrings."""

from __future__ import annotations

from pathlib import Path

from specrun.bindings.models.trial import trust_folder

_FOLDER = Path(__file__).parent
trust_folder(_FOLDER)


def demo_target() -> Path:
    """Return the path of the embedded target."""
    return _FOLDER / "target.gguf"


def demo_drafters() -> dict[str, Path]:
    """Return the embedded drafter files by the name their drafter has in the drafter language."""
    heads = {name: _FOLDER / f"{name}.gguf" for name in ("medusa", "eagle", "eagle3", "pass")}
    return {"draft": _FOLDER / "drafter.gguf", **heads}


def demo_questions() -> Path:
    """Return the file of questions with their answers, a JSON object a line."""
    return _FOLDER / "questions.jsonl"
