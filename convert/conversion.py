"""Converts a Hugging Face checkpoint folder to one GGUF file."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy.typing as npt

from specrun.bindings.errors import MalformedFileError, OptionError, UnsupportedModelError
from specrun.convert.checkpoint import Checkpoint, open_checkpoint
from specrun.convert.families import family_of
from specrun.convert.families.family import Family, TensorRule
from specrun.convert.hf_tokenizer import read_vocabulary
from specrun.convert.metadata import Metadata
from specrun.convert.model_name import model_name
from specrun.convert.names import nearest
from specrun.convert.number_types import stored_as
from specrun.convert.safetensors_file import StoredTensor
from specrun.convert.writer import PlannedTensor, Progress, write_gguf
from specrun.runtime.atomic import check_target

__all__ = ["OUTPUT_TYPES", "ConversionReport", "convert_checkpoint"]

OUTPUT_TYPES: dict[str, tuple[str, int]] = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32)}
"""The values of `outtype`, with the type of matrices and llama.cpp's number of the file type."""

_MOST_NAMED = 40  # tensors in one message
# Tensors that old checkpoints carry although they are computed.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias")


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What a conversion wrote: `type_name` is that of the matrices, `n_bytes` the size of the file."""

    output: Path
    architecture: str
    type_name: str
    n_tensors: int
    n_parameters: int
    n_words: int
    n_bytes: int


def convert_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    outtype: str = "f16",
    pre: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the checkpoint folder `source` (config.json, weights, tokenizer) to the file `output`.

    `outtype` is f32, f16 or bf16: the type of matrices; vectors stay float32. `pre` names the pre-tokenizer
    of a byte-level vocabulary as llama.cpp does, where it is not recognised. Config, words and shapes are
    checked before the first byte is written, then one tensor at a time is read, and the file appears whole
    or not at all.

    Raises OptionError (unknown `outtype`, `output` exists and `force` is not given), FileMissingError,
    MalformedFileError, UnsupportedModelError; SpecrunError if the disk is full.
    """
    if outtype.lower() not in OUTPUT_TYPES:
        known = ", ".join(OUTPUT_TYPES)
        hint = nearest(outtype.lower(), OUTPUT_TYPES)
        raise OptionError(f"outtype is {outtype!r}: use one of {known}{hint}; smaller types come from quantizing")
    type_name, file_type = OUTPUT_TYPES[outtype.lower()]
    folder, target = Path(source), Path(output)
    check_target(target, force=force)
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint.config)
    vocabulary = read_vocabulary(checkpoint, pre=pre)
    metadata = Metadata()
    metadata.text("general.type", "model")
    metadata.text("general.name", model_name(checkpoint, vocabulary.words))
    metadata.count("general.file_type", file_type)
    family.describe(checkpoint.config, metadata)
    vocabulary.describe(metadata)
    tensors = list(_plan(checkpoint, family, type_name))
    n_bytes = write_gguf(target, family.gguf_architecture, metadata, tensors, force=force, progress=progress)
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    return ConversionReport(
        target, family.gguf_architecture, type_name, len(tensors), parameters, len(vocabulary.words), n_bytes
    )


def _plan(checkpoint: Checkpoint, family: Family, type_name: str) -> Iterator[PlannedTensor]:
    used: set[str] = set()
    missing: list[str] = []
    for rule in family.rules(checkpoint.config):
        absent = [name for name in rule.sources if name not in checkpoint.tensors]
        missing += absent
        if len(missing) >= _MOST_NAMED:  # a config may state layers without end
            break
        if absent:
            continue
        stored = [checkpoint.tensor(name, rule.shape) for name in rule.sources]
        used.update(rule.sources)
        kind = "F32" if rule.is_f32 else type_name
        load = functools.partial(_load, rule, stored, kind)
        yield PlannedTensor(rule.name, rule.written_shape, kind, load)
    if missing:
        more = ", and perhaps more" if len(missing) >= _MOST_NAMED else ""
        raise MalformedFileError(f"{checkpoint.folder} has no tensor {', '.join(missing)}{more}: it is incomplete")
    left = [name for name in checkpoint.tensors if name not in used and not name.endswith(_COMPUTED)]
    # Where embeddings are tied, a head that is there all the same is a copy of them.
    left = [name for name in left if name != "lm_head.weight"]
    if left:
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        raise UnsupportedModelError(
            f"{checkpoint.folder} has tensors its architecture does not know: {', '.join(left[:_MOST_NAMED])}{more}"
        )


def _load(rule: TensorRule, stored: list[StoredTensor], kind: str) -> npt.NDArray[Any]:
    array = rule.change(*(tensor.read() for tensor in stored))
    return stored_as(array, kind, rule.sources[0] if rule.sources else rule.name)
