"""The files of a trained model: config.json, tokenizer, model card, and last the weights.

A folder with its weights is whole: every file is written aside and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specrun.bindings.files import atomic_path
from specrun.train.trainer.run import TrainingReport

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


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of tokens, chat template and generation of a Hugging Face folder."""
    for pattern in _TOKENIZER_FILES:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    with atomic_path(path, force=True) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_weights(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """Write tensors as safetensors, as Hugging Face tools read them, whole or not at all.

    `about` is added to the file's metadata.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path, force=True) as aside:
        save_file(stored, aside, metadata={"format": "pt", **about})


def model_card(
    title: str,
    *,
    tags: str,
    base_model: str,
    made: str,
    sections: Mapping[str, Sequence[str]],
    commands: Sequence[str] = (),
) -> str:
    """Return a model card in Markdown: front matter, title, `made`, sections, commands of use."""
    lines = ["---", f"tags: [speculative-decoding, {tags}]", f"base_model: {base_model}", "---"]
    lines += [f"# {title}", "", made]
    for name, content in sections.items():
        lines += ["", f"## {name}", *content]
    if commands:
        lines += ["", "## Use", "```", *commands, "```"]
    return "\n".join(lines) + "\n"


def training_lines(report: TrainingReport, losses: str, settings: Mapping[str, Any]) -> list[str]:
    """Return a card's lines on the length of a training; `losses` is a text about the loss."""
    result = report.result
    spent = f"{result.tokens:,} tokens, {result.seconds:,.0f} s on {report.device}"
    table = table_lines("| setting | |", settings)
    return [f"{len(result.curves.losses):,} steps, {spent}; {losses}", "", *table]


def table_lines(head: str, rows: Mapping[str, Any]) -> list[str]:
    """Return a Markdown table of names and values under the line `head`."""
    return [
        head,
        "|---" * (head.count("|") - 1) + "|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
