"""The folder of a training run: config.json, model card, and weights, which come last: with them it
is whole.

The model card of what was trained: from what, how, and what it can do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from specrun.bindings.atomic import atomic_path
from specrun.bindings.errors import OptionError, SpecrunError
from specrun.runtime.methods import method_of_head
from specrun.train.data.token_corpus import TokenCorpus
from specrun.train.heads.recipe import HeadFiles
from specrun.train.trainer.listener import TrainingResult
from specrun.train.trainer.run import TrainingRun
from specrun.train.trainer.run_checkpoint import check_checkpoint

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

    `holds` names the file that a finished run leaves, `reads` the folders of the models that the
    run reads: none of them is written into, whatever else is said. Raises FileMissingError where
    there is no checkpoint to resume.
    """
    folder = run.output
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"{folder} is a file; name a folder to write into")
    if folder.exists() and any(read.exists() and folder.samefile(read) for read in reads):
        raise OptionError(
            f"{folder} is the folder of a model that is read; name another folder to write"
        )
    if run.resume or run.force:
        if run.resume:
            check_checkpoint(run.state_path, resume=True)
        return
    if (folder / holds).exists():
        raise OptionError(
            f"{folder} already holds {holds}; choose another folder, or overwrite it with --force"
        )
    strange = [name for name in (_CONFIG, _CARD) if (folder / name).exists()]
    if strange and not run.state_path.exists():
        raise OptionError(
            f"{folder} holds {strange[0]} of something else; choose another folder, or overwrite "
            "it with --force"
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
        raise SpecrunError(
            f"{run.output} cannot be made ({error.strerror}); choose another folder"
        ) from error
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


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says: `kind` is a heading, `target` and `data` are named without their
    folders."""

    kind: str
    target: Path
    teacher: Path | None
    data: Sequence[Path]
    device: str
    settings: Mapping[str, Any]
    n_trained: int


def training_card(facts: CardFacts, corpus: TokenCorpus, result: TrainingResult) -> str:
    """Return the card in Markdown."""
    curves = result.curves
    measures = curves.measures[-1][1] if curves.measures else {}
    lines = [
        "---",
        f"tags: [speculative-decoding, {facts.kind}]",
        f"base_model: {facts.target.name}",
        "---",
        f"# {facts.kind} for {facts.target.name}",
        "",
        f"Made by `specrun train {facts.kind}`; {facts.n_trained:,} trained parameters. It "
        "drafts for this target "
        "only, and verification keeps the target's own tokens or distribution whatever it drafts.",
        "",
        "## Data",
        _data_sentence(facts, corpus),
        "",
        "## Training",
        f"{len(curves.losses):,} steps, {result.tokens:,} tokens, {result.seconds:,.0f} s on "
        f"{facts.device}; "
        f"the loss fell from {curves.losses[0]:.4f} to {curves.losses[-1]:.4f}.",
    ]
    if facts.teacher is not None:
        lines.append(
            f"Hidden states and laws are those of {facts.teacher.name}, computed by llama.cpp."
        )
    lines += [
        "",
        "| setting | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.settings.items()),
    ]
    where = (
        "the training texts, too few to hold any out"
        if corpus.measured_on_training
        else "held-out texts"
    )
    lines += [
        "",
        "## What it can do",
        (
            f"Agreement with the target's own first choice, on {where}; `tokens a round` counts "
            "those of a drafted chain"
        ),
        "and the target's own.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value:.3f} |" for name, value in measures.items()),
    ]
    method = method_of_head(facts.kind)
    if method is not None:
        convert = "specrun convert FOLDER --target TARGET.gguf -o head.gguf"
        chat = f'specrun chat -m TARGET.gguf --drafter "{method.name}(head.gguf)"'
        lines += ["", "## Use", "```", convert, chat, "```"]
    return "\n".join(lines) + "\n"


def _data_sentence(facts: CardFacts, corpus: TokenCorpus) -> str:
    learnt = sum(int(corpus.sequences[number].learnt.sum()) for number in corpus.training)
    aside = 0 if corpus.measured_on_training else len(corpus.held_out)
    names = ", ".join(path.name for path in facts.data)
    return (
        f"{names}: {len(corpus.training):,} sequences, {corpus.n_tokens:,} tokens, {learnt:,} of "
        "them learnt; "
        f"{aside:,} sequences held out. The licences of the data and of the target apply."
    )
