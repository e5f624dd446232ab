"""A trained head's folder: config.json, weights, model card; the weights come last, so a folder with them is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.atomic import atomic_path
from specrun.train.head_recipe import HeadFiles

__all__ = ["check_output", "open_output", "write_head"]

_CONFIG, _CARD = "config.json", "README.md"


def check_output(folder: Path, *, resume: bool, force: bool, holds: str, reads: Iterable[Path] = ()) -> None:
    """Raise OptionError where the folder has something that a run would overwrite.

    `holds` names the file that a finished run leaves, `reads` the folders of the models that the run reads: none of
    them is written into, whatever else is said.
    """
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; name a folder to write into")
    if folder.exists() and any(one.exists() and folder.samefile(one) for one in reads):
        raise OptionError(f"{folder} is the folder of a model that is read; name another folder to write")
    if resume or force:
        return
    if (folder / holds).exists():
        raise OptionError(f"{folder} already holds {holds}; choose another folder, or overwrite it with --force")
    strange = [name for name in (_CONFIG, _CARD) if (folder / name).exists()]
    if strange and not (folder / "training" / "state.pt").exists():
        raise OptionError(
            f"{folder} holds {strange[0]} of something else; choose another folder, or overwrite it with --force"
        )


def open_output(folder: Path, *, resume: bool, force: bool, holds: str) -> None:
    """Make the folder; raises as `check_output`, and SpecrunError where it cannot be made."""
    check_output(folder, resume=resume, force=force, holds=holds)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecrunError(f"{folder} cannot be made ({error.strerror}); choose another folder") from error


def write_head(folder: Path, files: HeadFiles, weights_name: str, card: str) -> None:
    """Write all files of a head, each whole or not at all."""
    _write_text(folder / _CONFIG, json.dumps(dict(files.config), indent=2) + "\n")
    _write_text(folder / _CARD, card)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in files.tensors.items()}
    with atomic_path(folder / weights_name, force=True) as aside:
        save_file(tensors, aside, metadata={"format": "pt"})


def _write_text(path: Path, text: str) -> None:
    with atomic_path(path, force=True) as aside:
        aside.write_text(text, encoding="utf-8")
