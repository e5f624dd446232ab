"""Quantizes a GGUF file: checked before, written aside, and looked at after."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specrun.bindings.errors import OptionError, SpecrunError, UnsupportedModelError
from specrun.bindings.gguf_header import GGUFHeader, read_header
from specrun.bindings.quantizer import FILE_TYPES, quantize_file
from specrun.convert.names import nearest
from specrun.runtime.atomic import atomic_path, check_target, require_free_space

__all__ = ["QuantizationReport", "quantize_model"]

_PLAIN = {"F32", "F16", "BF16"}
_BLOCK = 32  # the smallest block of numbers that shares a scale


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What a quantization wrote.

    `tensor_types` counts the tensors of each type. `n_substituted` is how many matrices llama.cpp could not
    store as asked, because their rows do not divide into the type's blocks (256 numbers for K types), and
    stored as a larger type.
    """

    output: Path
    file_type: str
    source_bytes: int
    n_bytes: int
    n_parameters: int
    bits_per_weight: float
    tensor_types: Mapping[str, int]
    n_substituted: int


def quantize_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    ftype: str,
    *,
    force: bool = False,
    n_threads: int = 0,
    pure: bool = False,
    allow_requantize: bool = False,
) -> QuantizationReport:
    """Write the GGUF file `source` to `output` with numbers of type `ftype`, such as "Q4_K_M" in any case.

    `n_threads` 0 means as many as cores; `pure` gives every matrix the same type instead of llama.cpp's mix;
    `allow_requantize` accepts a source that is quantized already, at a loss.

    Raises OptionError (unknown type, `output` exists without `force`, a quantized source, rows that no
    quantized type can hold), FileMissingError, MalformedFileError, UnsupportedModelError for one part of a
    split model, ModelError if llama.cpp fails. Nothing is left behind on failure.
    """
    name = _known_type(ftype)
    original, target = Path(source), Path(output)
    check_target(target, force=force)
    header = read_header(original)
    _check_source(original, header, name, allow_requantize)
    bits = {"F32": 32, "F16": 16, "BF16": 16}.get(name)
    require_free_space(target.parent, header.n_parameters * bits // 8 if bits else header.file_size)
    with atomic_path(target, force=force) as aside:
        quantize_file(original, aside, name, n_threads=n_threads, pure=pure, allow_requantize=allow_requantize)
        written = read_header(aside)
        if len(written.tensors) != len(header.tensors):
            counts = f"{len(written.tensors)} of {len(header.tensors)}"
            raise SpecrunError(f"llama.cpp wrote {counts} tensors of {original}: this is a mistake in specrun")
    return _report(target, name, header, written)


def _known_type(ftype: str) -> str:
    if ftype.upper() not in FILE_TYPES:
        hint = nearest(ftype.upper(), FILE_TYPES)
        raise OptionError(f"there is no file type {ftype!r}{hint}; use one of {', '.join(FILE_TYPES)}")
    return ftype.upper()


def _check_source(path: Path, header: GGUFHeader, name: str, allow_requantize: bool) -> None:
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(f"{path} is one part of a split model: merge the parts first")
    quantized = sorted({tensor.type_name for tensor in header.tensors} - _PLAIN - {"I32", "I64", "F64"})
    if quantized and not allow_requantize:
        raise OptionError(
            f"{path} is quantized already ({', '.join(quantized)}): quantize the original, "
            "or accept the loss with --allow-requantize"
        )
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    if name not in _PLAIN and isinstance(width, int) and width % _BLOCK:
        raise OptionError(
            f"{path} has rows of {width} numbers, not a multiple of {_BLOCK}: "
            f"it can be converted to F16, BF16 or F32, but not to {name}"
        )


def _report(target: Path, name: str, source: GGUFHeader, written: GGUFHeader) -> QuantizationReport:
    block = 1 if name in _PLAIN else 256 if "_K" in name else _BLOCK
    matrices = [tensor for tensor in written.tensors if len(tensor.shape) > 1 and "weight" in tensor.name]
    return QuantizationReport(
        output=target,
        file_type=name,
        source_bytes=source.file_size,
        n_bytes=written.file_size,
        n_parameters=written.n_parameters,
        bits_per_weight=8 * sum(tensor.n_bytes for tensor in written.tensors) / written.n_parameters,
        tensor_types=written.tensor_type_counts,
        n_substituted=sum(tensor.shape[0] % block != 0 for tensor in matrices),
    )
