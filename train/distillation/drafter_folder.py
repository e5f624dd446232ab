"""The folder of a trained drafter: weights, config and the drafter's own tokenizer files, for other tools too."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrun.runtime.atomic import require_free_space, sync_folder
from specrun.train.head_folder import copy_tokenizer
from specrun.train.hf_model import HFModel
from specrun.train.precision import dtype_name

__all__ = ["write_drafter_folder"]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def write_drafter_folder(draft: HFModel, source: Path, output: Path, card: str) -> None:
    """Write the drafter, whose config and tokenizer are those of the folder `source`, into the folder `output`.

    Weights are written in the numbers they were trained in. Files are written aside and renamed, weights last, so that
    an interrupted call leaves either the old model or none that loads half.
    """
    require_free_space(output, sum(one.numel() * one.element_size() for one in draft.module.parameters()))
    with _aside(output) as aside:
        with _without_bars():
            draft.model.save_pretrained(aside)
        copy_tokenizer(source, aside)
        # As published, where transformers writes its own version's words; only the numbers' type is another now.
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("dtype", None)
        config["torch_dtype"] = dtype_name(next(draft.module.parameters()).dtype)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / "README.md").write_text(card, encoding="utf-8")
        written = sorted(aside.iterdir(), key=lambda path: (path.suffix == ".safetensors", path.name in _WEIGHTS))
        for path in written:
            path.replace(output / path.name)
    sync_folder(output)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars of its own."""
    import transformers

    quiet: Any = transformers.utils.logging
    drawn = quiet.is_progress_bar_enabled()
    quiet.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            quiet.enable_progress_bar()


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """Yield a hidden folder within `output`, which is gone afterwards."""
    folder = output / f".{secrets.token_hex(8)}.partial"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
