"""Names of models: their parts, the model card, and file names by the GGUF convention.

The convention (ggml's docs/gguf.md): `<base>-<size>-<fine-tune>-<version>-<encoding>.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from gguf import Metadata as GGUFNames
from gguf.utility import naming_convention, size_label

from specrun.convert.checkpoint import Checkpoint, JsonObject
from specrun.convert.gguf.writer import Metadata

_LONGEST_CARD = 1 << 16
_MOST_BRACKETS = 500  # the parser takes time with the square of their depth
_LONGEST_TEXT = 400
_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[^\w.+-]+")


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's name, its parts if they can be found, and its card's `facts` by GGUF key."""

    name: str
    basename: str | None
    size_label: str
    finetune: str | None
    version: str | None
    facts: Mapping[str, str | list[str]]

    def describe(self, metadata: Metadata) -> None:
        """Add the keys of the name and the card to `metadata`."""
        metadata.text("general.name", self.name)
        for key in ("basename", "finetune", "version"):
            if value := getattr(self, key):
                metadata.text(f"general.{key}", value)
        metadata.text("general.size_label", self.size_label)
        for key, fact in self.facts.items():
            if isinstance(fact, str):
                metadata.text(key, fact)
            else:
                metadata.texts(key, fact)


def name_of(folder: Path, n_parameters: int) -> ModelName:
    """Return a checkpoint's name: its folder's, taken apart, and the facts of its README."""
    name = _folder_name(folder.resolve())
    _, _, basename, finetune, version, _ = GGUFNames.get_model_id_components(name, n_parameters)
    label = size_label(n_parameters, 0, 0, 0)
    return ModelName(name, basename, label, finetune, version, _card_facts(folder))


def _folder_name(folder: Path) -> str:
    # The hub's cache keeps a model as models--<owner>--<name>/snapshots/<revision>.
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.rpartition("--")[2]
    return folder.name or "model"


def file_name(name: ModelName, encoding: str) -> str:
    """Return the conventional file name; `encoding` is the file type, such as F16 or Q4_K_M."""
    parts = name.name, name.basename, name.finetune, name.version, name.size_label
    return safe_file_name(str(naming_convention(*parts, encoding)))


def safe_file_name(name: str) -> str:
    """Return the name of a GGUF file, with characters replaced that file names cannot have."""
    return f"{_NOT_IN_NAMES.sub('-', name).strip('-.') or 'model'}.gguf"


def _card_facts(folder: Path) -> dict[str, str | list[str]]:
    """Return the facts of the README's front matter; none if it cannot be read."""
    card = _front_matter(folder / "README.md")
    facts: dict[str, str | list[str]] = {}
    for key in ("license", "license.name", "license.link"):
        value = card.get(key.replace(".", "_"))
        if isinstance(value, str):
            facts[f"general.{key}"] = value[:_LONGEST_TEXT]
    for key, theirs in (("tags", "tags"), ("languages", "language")):
        if values := _texts(card.get(theirs)):
            facts[f"general.{key}"] = values
    return facts


def _texts(value: Any) -> list[str]:  # noqa: ANN401 - any YAML value
    values = value if isinstance(value, list) else [value]
    return [text[:_LONGEST_TEXT] for text in values if isinstance(text, str)][:100]


def _front_matter(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_CARD).decode("utf-8", "replace")
        found = _FRONT_MATTER.match(text.replace("\r\n", "\n"))
        if found is None or found[1].count("[") + found[1].count("{") > _MOST_BRACKETS:
            return {}
        card = yaml.safe_load(found[1])
    except (OSError, yaml.YAMLError, RecursionError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


# llama.cpp looks for these in the name. If one is there, control tokens swallow the spaces behind
# them, as Phi-3's tokenizer requires, and a file without the four tokens cannot be loaded.
_PHI3 = ("phi-3", "phi3")
_PHI3_TOKENS = ("</s>", "<unk>", "<s>", "<|endoftext|>")


def loadable_name(name: str, checkpoint: Checkpoint, tokens: Collection[str]) -> str:
    """Return `name`, changed if llama.cpp would read something wrong out of it."""
    named = any(mark in name.lower() for mark in _PHI3)
    has_tokens = all(token in tokens for token in _PHI3_TOKENS)
    if named and not has_tokens:
        return "model"
    if not named and has_tokens and _swallows_spaces(checkpoint):
        return f"{name} (phi-3)"
    return name


def _swallows_spaces(checkpoint: Checkpoint) -> bool:
    for value in checkpoint.optional("tokenizer.json").items("added_tokens"):
        entry = JsonObject(value if isinstance(value, dict) else {}, "an added token")
        if entry.any("content") == "</s>":
            return entry.any("rstrip") is True
    return False
