"""The folder of a training run: config.json, model card, and weights, which come last: with them it is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.atomic import atomic_path
from specrun.train.head_recipe import HeadFiles
from specrun.train.run_checkpoint import check_checkpoint
from specrun.train.training_run import TrainingRun

__all__ = ["check_output", "copy_tokenizer", "open_output", "write_head"]

_CONFIG, _CARD = "config.json", "README.md"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "chat_template.json",
    "generation_config.json",
)


def check_output(run: TrainingRun, *, holds: str, reads: Iterable[Path] = ()) -> None:
    """Raise OptionError where the folder has something that a run would overwrite.

    `holds` names the file that a finished run leaves, `reads` the folders of the models that the run
    reads: none of them is written into, whatever else is said. Raises FileMissingError where there is
    no checkpoint to resume.
    """
    folder = run.output
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; name a folder to write into")
    if folder.exists() and any(one.exists() and folder.samefile(one) for one in reads):
        raise OptionError(f"{folder} is the folder of a model that is read; name another folder to write")
    if run.resume or run.force:
        if run.resume:
            check_checkpoint(run.state_path, resume=True)
        return
    if (folder / holds).exists():
        raise OptionError(f"{folder} already holds {holds}; choose another folder, or overwrite it with --force")
    strange = [name for name in (_CONFIG, _CARD) if (folder / name).exists()]
    if strange and not run.state_path.exists():
        raise OptionError(
            f"{folder} holds {strange[0]} of something else; choose another folder, or overwrite it with --force"
        )
    check_checkpoint(run.state_path, resume=False)


def open_output(run: TrainingRun, *, holds: str) -> None:
    """Make the folder, without an earlier run's checkpoint where that is overwritten.

    Raises as `check_output`, and SpecrunError where the folder cannot be made.
    """
    check_output(run, holds=holds)
    try:
        run.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecrunError(f"{run.output} cannot be made ({error.strerror}); choose another folder") from error
    if run.force and not run.resume:
        run.state_path.unlink(missing_ok=True)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what a Hugging Face folder says of its tokens, chat template and generation."""
    for pattern in _TOKENIZER_FILES:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)


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
