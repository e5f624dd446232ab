"""Quantizes heads that read a target's hidden states: Medusa, Hydra, EAGLE.

llama.cpp has no such architectures, so each matrix goes through ggml's own conversion of rows.
Matrices become the type that was chosen, Q8_0 by default; norms, other vectors and tables of
token ids stay as they are.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from specrun.bindings.errors import OptionError, UnsupportedModelError
from specrun.bindings.files import check_target
from specrun.bindings.gguf import BLOCK_SIZES, GGUFHeader, TensorInfo, read_header
from specrun.bindings.quantizer import COPY, FILE_TYPES
from specrun.convert.gguf import (
    FLOATS,
    GGUFSource,
    PlannedTensor,
    Progress,
    stored_numbers,
)
from specrun.convert.quantize.quantize import (
    QuantizationReport,
    known_file_type,
    known_tensor_type,
    quantization_report,
)
from specrun.runtime.language import METHODS

_HEADS = [method for method in METHODS.values() if method.head and not method.llama_cpp_head]
HEAD_ARCHITECTURES = tuple(method.head for method in _HEADS if method.head)
"""The architectures of our heads; EAGLE-3's is llama.cpp's own, which quantizes it itself."""

HEAD_TYPE = "Q8_0"
"""The default file type of heads."""

_WHOLE = ("I8", "I16", "I32", "I64")
# llama.cpp's substitutes if rows do not divide into blocks of 256 (tensor_type_fallback).
_NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NARROWER |= dict.fromkeys(("IQ3_S", "IQ4_XS"), "IQ4_NL")
_NARROWER |= dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_0")


def is_head(header: GGUFHeader) -> bool:
    """Return whether the file is a head that `quantize_head` quantizes."""
    return header.architecture in HEAD_ARCHITECTURES


def quantize_head(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    ftype: str = HEAD_TYPE,
    *,
    force: bool = False,
    n_threads: int = 0,
    allow_requantize: bool = False,
    leave_output_tensor: bool = False,
    output_tensor_type: str | None = None,
    token_embedding_type: str | None = None,
    tensor_types: Sequence[tuple[str, str]] = (),
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write the head `source` to `output`, its matrices in the base type of `ftype` (Q4_K_M: Q4_K).

    Options are those of `quantize_model`. The output matrices are those named `output.weight`, also
    within a head. Raises OptionError (unknown type, one that needs an importance matrix, `output`
    exists without `force`, a quantized source), FileMissingError, MalformedFileError,
    UnsupportedModelError for a file that is no head. Nothing is left behind on failure.
    """
    name = known_file_type(ftype)
    if name != COPY and FILE_TYPES[name].needs_importance:
        raise OptionError(
            f"{name} needs an importance matrix, and there are none for heads: use IQ4_XS or larger"
        )
    target = Path(output)
    check_target(target, force=force)
    header = read_header(source)
    if not is_head(header):
        raise UnsupportedModelError(
            f"{os.fspath(source)} is a {header.architecture}, no head: quantize it as a model"
        )
    head = GGUFSource(source)
    # The first that matches counts.
    named = (("^token_embd", token_embedding_type), (r"(^|\.)output", output_tensor_type))
    types = [(rf"{name}\.weight$", kind) for name, kind in named if kind] + list(tensor_types)
    overrides = [(re.compile(pattern), known_tensor_type(kind)) for pattern, kind in types]
    planned = list(_plan(head, name, overrides, leave_output_tensor, allow_requantize, n_threads))
    metadata = head.metadata()
    if name != COPY:
        metadata.count("general.file_type", FILE_TYPES[name].number)
        metadata.count("general.quantization_version", 2)
    head.write_changed(target, metadata, planned, force=force, progress=progress)
    return quantization_report(target, name, header, _matrices(header))


def _matrices(header: GGUFHeader) -> Iterator[TensorInfo]:
    for tensor in header.tensors:
        whole = tensor.type_name in _WHOLE
        if len(tensor.shape) > 1 and not whole and "norm" not in tensor.name:
            yield tensor


def _plan(
    head: GGUFSource,
    name: str,
    overrides: Sequence[tuple[re.Pattern[str], str]],
    leave_output: bool,
    allow_requantize: bool,
    n_threads: int,
) -> Iterator[PlannedTensor]:
    matrices = {tensor.name for tensor in _matrices(head.header)}
    for tensor in head.header.tensors:
        kind = tensor.type_name
        is_output = tensor.name.split(".")[-2:] == ["output", "weight"]
        if tensor.name in matrices and name != COPY and not (leave_output and is_output):
            chosen = (kind for pattern, kind in overrides if pattern.search(tensor.name))
            kind = next(chosen, "") or fitting_type(FILE_TYPES[name].base_type, tensor.shape[0])
            if tensor.shape[0] % BLOCK_SIZES[kind]:
                raise OptionError(
                    f"{tensor.name} has rows of {tensor.shape[0]} numbers, which {kind} cannot hold"
                )
            if tensor.type_name not in FLOATS and kind != tensor.type_name and not allow_requantize:
                raise OptionError(
                    f"{head.path} is quantized already ({tensor.type_name}): quantize the "
                    "original, or accept the loss with --allow-requantize"
                )
        elif tensor.type_name in ("F16", "BF16") and len(tensor.shape) < 2:
            kind = "F32"  # vectors are few, and their errors reach every number of a row
        if kind == tensor.type_name:
            yield head.unchanged(tensor)
        else:
            load = functools.partial(_converted, head, tensor, kind, n_threads)
            yield PlannedTensor(tensor.name, tensor.shape[::-1], kind, load)


def _converted(head: GGUFSource, tensor: TensorInfo, kind: str, n_threads: int) -> npt.NDArray[Any]:
    return stored_numbers(head.numbers(tensor), kind, tensor.name, n_threads)


def fitting_type(kind: str, width: int) -> str:
    """Return the type `kind`, or the next wider one whose blocks divide rows of `width` numbers."""
    if width % BLOCK_SIZES[kind]:
        kind = _NARROWER.get(kind, kind)
    return "F16" if width % BLOCK_SIZES[kind] else kind
