"""Quantization of a GGUF model with llama.cpp's quantizer: planned, written aside, checked."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specrun.bindings.errors import (
    MalformedFileError,
    ModelError,
    OptionError,
    PairError,
    SpecrunError,
)
from specrun.bindings.files import atomic_path, check_target, require_free_space, require_writable
from specrun.bindings.gguf import BLOCK_SIZES, GGUFHeader, TensorInfo, read_header, stored_bytes
from specrun.bindings.models import is_known_file, remember_written
from specrun.bindings.quantizer import (
    COPY,
    FILE_TYPE_ALIASES,
    FILE_TYPES,
    TENSOR_NUMBERS,
    TOKEN_MATRICES,
    QuantizeOptions,
    QuantizerProcess,
    needs_importance,
)
from specrun.convert.gguf import FLOATS, Progress, require_whole
from specrun.convert.names import nearest
from specrun.convert.quantize.imatrix_file import ImportanceMatrix, read_importance

# == The plan: the type of every tensor, as llama.cpp's log of a dry run names it ==================
#
# An importance matrix is checked against the plan: it must fit the model, and must be present if a
# type of less than 3 bits requires one.


# Such as "[   3/  48] blk.0.attn_k.weight - [ 4096, 1024, 1, 1], type = f16, size = ... (q4_K)".
_LINE = re.compile(r"\[ *\d+/ *\d+\] (.+?) +- \[[\d, ]+\], type = +(\w+),(?:.*-> .* \((\w+)\))?")


@dataclass(frozen=True, slots=True)
class _PlannedType:
    """A tensor and the type it will be stored in."""

    tensor: TensorInfo
    type_name: str

    @property
    def changes(self) -> bool:
        """Whether it is stored in another type than now."""
        return self.type_name != self.tensor.type_name

    @property
    def n_bytes(self) -> int:
        """The size it will have."""
        return stored_bytes(self.tensor.shape, self.type_name)


def _steps(header: GGUFHeader, log: Iterable[str]) -> Iterator[_PlannedType]:
    """Yield tensors of `header` and their types as llama.cpp's log comes to them."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    for line in log:
        match = _LINE.match(line)
        if match and match[1] in tensors:
            yield _PlannedType(tensors[match[1]], (match[3] or match[2]).upper())


def _planned_types(header: GGUFHeader, log: Iterable[str]) -> list[_PlannedType]:
    """Return the type of every tensor of `header`, from the log of llama.cpp's dry run.

    Raises SpecrunError if the log does not name them all.
    """
    planned = {step.tensor.name: step for step in _steps(header, log)}
    missing = next((tensor.name for tensor in header.tensors if tensor.name not in planned), None)
    if missing is not None:
        raise SpecrunError(
            f"llama.cpp's plan lacks the tensor {missing}: this is a mistake in specrun"
        )
    return list(planned.values())


def _check_importance(model: Path, plan: Sequence[_PlannedType], options: QuantizeOptions) -> int:
    """Return how many matrices get quantized without an entry in the importance matrix.

    The token embedding and output matrices, which have none by default, do not count. Raises
    OptionError if a type needs a matrix and there is none, PairError if it has entries of another
    model or lacks one that is needed.
    """
    tensors = {planned.tensor.name: planned.tensor for planned in plan}
    for name, means in options.importance.items():
        _check_entry(model, name, tensors.get(name), means.size)
    changed = [planned for planned in plan if planned.changes and planned.type_name not in FLOATS]
    missing = [planned for planned in changed if planned.tensor.name not in options.importance]
    for planned in missing:
        if not needs_importance(planned.tensor.name, planned.type_name, options.file_type):
            continue
        if not options.importance:
            raise OptionError(
                f"{options.file_type} stores {planned.tensor.name} as {planned.type_name}, which "
                "needs an importance "
                "matrix: make one with specrun imatrix, and pass it with --imatrix"
            )
        if planned.tensor.name in TOKEN_MATRICES:
            raise OptionError(
                f"the importance matrix has no entry for {planned.tensor.name}, as usual, and "
                f"{planned.type_name} needs one: "
                "name a larger type with --token-embedding-type or --output-tensor-type"
            )
        raise PairError(
            f"the importance matrix has no entry for {planned.tensor.name}, which {model} needs to "
            f"become {planned.type_name}: was it made for another model, or from too short a text?"
        )
    counted = missing if options.importance else ()
    return sum(planned.tensor.name not in TOKEN_MATRICES for planned in counted)


def n_inputs(tensor: TensorInfo) -> int:
    """Return how many inputs a matrix has, all matrices of a stack of experts together."""
    return tensor.n_elements // (tensor.shape[1] if len(tensor.shape) > 1 else 1)


def _check_entry(model: Path, name: str, tensor: TensorInfo | None, size: int) -> None:
    if tensor is None:
        raise PairError(
            f"the importance matrix is of another model: it has {name}, which {model} lacks"
        )
    wanted = n_inputs(tensor)
    if size != wanted:
        raise PairError(
            f"the importance matrix is of another model: it has {size:,} inputs for {name}, "
            f"and {model} has {wanted:,}"
        )


# == Quantization ==================================================================================


_KEPT = {"F64", "I8", "I16", "I32", "I64"}
_BLOCK = 32  # the smallest block of numbers that shares a scale
# Enough rows to keep every thread busy: a whole tensor at a time would be no faster.
_BUFFER_BYTES = 32 << 20
_HEADER_ROOM = 1 << 20  # a header may grow by the keys that name the importance matrix


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one type in a file."""

    type_name: str
    n_tensors: int
    n_parameters: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The result of a quantization.

    `tensor_types` counts the tensors of each type, `shares` are their bytes. `n_substituted` is the
    number of matrices that llama.cpp could not store in the wanted type, because their rows do not
    divide into the type's blocks (256 numbers for K types), and stored as a larger type.
    `n_without_importance` is how many matrices became smaller without an entry in the importance
    matrix that was given (the token matrices have none by default).
    """

    output: Path
    file_type: str
    source_bytes: int
    n_bytes: int
    n_parameters: int
    bits_per_weight: float
    tensor_types: Mapping[str, int]
    shares: tuple[TypeShare, ...]
    n_substituted: int
    n_without_importance: int = 0


def quantize_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    ftype: str,
    *,
    force: bool = False,
    n_threads: int = 0,
    pure: bool = False,
    allow_requantize: bool = False,
    leave_output_tensor: bool = False,
    output_tensor_type: str | None = None,
    token_embedding_type: str | None = None,
    tensor_types: Sequence[tuple[str, str]] = (),
    imatrix: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Write the GGUF file `source` to `output` with numbers of type `ftype`, such as "q4_k_m".

    `n_threads` 0 means as many as cores; `pure` gives every matrix the same type instead of
    llama.cpp's mix; `allow_requantize` accepts a source that is quantized already, at a loss.
    `tensor_types` are pairs of a regular expression, searched in tensor names, and a tensor type;
    `imatrix` is the file of an importance matrix. llama.cpp works in a process of its own, so an
    interrupt ends it at once.

    Raises OptionError (unknown type, `output` exists without `force`, a quantized source, rows that
    no quantized type can hold, a type that needs an importance matrix), FileMissingError,
    MalformedFileError, PairError (the matrix of another model), UnsupportedModelError for one part
    of a split model, SpecrunError if the disk is full, ModelError if llama.cpp fails. Nothing is
    left behind on failure.
    """
    options = QuantizeOptions(
        known_file_type(ftype),
        n_threads=n_threads,
        pure=pure,
        allow_requantize=allow_requantize,
        leave_output_tensor=leave_output_tensor,
        output_tensor_type=output_tensor_type and known_tensor_type(output_tensor_type),
        token_embedding_type=token_embedding_type and known_tensor_type(token_embedding_type),
        tensor_types=tuple((pattern, known_tensor_type(kind)) for pattern, kind in tensor_types),
        buffer_bytes=_BUFFER_BYTES,
    )
    original, target = Path(source), Path(output)
    check_target(target, force=force)
    header = read_header(original)
    _check_source(original, header, options)
    _check_overrides(original, header, options)
    require_writable(target)
    if imatrix is not None:
        options = _with_importance(options, Path(imatrix), read_importance(imatrix))
    with QuantizerProcess(original, options) as quantizer:
        plan = _planned_types(header, quantizer.plan())
        without = _check_importance(original, plan, options)
        require_free_space(target.parent, sum(planned.n_bytes for planned in plan) + _HEADER_ROOM)
        with atomic_path(target, force=force) as aside:
            written = _write(quantizer, aside, header, plan, progress)
    if is_known_file(original):
        remember_written(target)
    matrices = [tensor for tensor in written.tensors if len(tensor.shape) > 1]
    matrices = [tensor for tensor in matrices if "weight" in tensor.name]
    return quantization_report(target, options.file_type, header, matrices, without)


def known_file_type(typed: str) -> str:
    """Return the file type typed in any case; raises OptionError with the nearest one."""
    name = FILE_TYPE_ALIASES.get(typed.upper(), typed.upper())
    if name not in FILE_TYPES and name != COPY:
        hint = nearest(typed.upper(), FILE_TYPES)
        raise OptionError(
            f"there is no file type {typed!r}{hint}; use one of {', '.join(FILE_TYPES)}, {COPY}"
        )
    return name


def known_tensor_type(typed: str) -> str:
    """Return the tensor type typed in any case; raises OptionError with the nearest one."""
    if typed.upper() not in TENSOR_NUMBERS:
        hint = nearest(typed.upper(), TENSOR_NUMBERS)
        known = ", ".join(TENSOR_NUMBERS)
        raise OptionError(f"there is no tensor type {typed!r}{hint}; use one of {known}")
    return typed.upper()


def _share_types(header: GGUFHeader) -> tuple[TypeShare, ...]:
    """Return the bytes of the tensors of each type, the heaviest type first."""
    shares = []
    for name in header.tensor_type_counts:
        tensors = [tensor for tensor in header.tensors if tensor.type_name == name]
        n_parameters = sum(tensor.n_elements for tensor in tensors)
        n_bytes = sum(tensor.n_bytes for tensor in tensors)
        shares.append(TypeShare(name, len(tensors), n_parameters, n_bytes))
    return tuple(sorted(shares, key=lambda share: -share.n_bytes))


def _check_source(path: Path, header: GGUFHeader, options: QuantizeOptions) -> None:
    require_whole(path, header)
    if options.file_type == COPY:
        return
    quantized = sorted({tensor.type_name for tensor in header.tensors}.difference(FLOATS, _KEPT))
    if quantized and not options.allow_requantize:
        raise OptionError(
            f"{path} is quantized already ({', '.join(quantized)}): quantize the original, "
            "or accept the loss with --allow-requantize"
        )
    width = header.metadata.get(f"{header.architecture}.embedding_length")
    if options.file_type not in FLOATS and isinstance(width, int) and width % _BLOCK:
        raise OptionError(
            f"{path} has rows of {width} numbers, not a multiple of {_BLOCK}: "
            f"it can be converted to F16, BF16 or F32, but not to {options.file_type}"
        )


def _check_overrides(path: Path, header: GGUFHeader, options: QuantizeOptions) -> None:
    """Refuse types of single tensors that llama.cpp would ignore or answer with an assertion."""
    if options.tensor_types and options.file_type in {*FLOATS, COPY}:
        raise OptionError(
            f"types of single tensors have no effect with {options.file_type}: name a quantized "
            "type"
        )
    for pattern, _ in options.tensor_types:
        try:
            found = any(re.search(pattern, tensor.name) for tensor in header.tensors)
        except re.error as error:
            raise OptionError(
                f"{pattern!r} in a tensor type is no regular expression ({error})"
            ) from error
        if not found:
            parts = [part for tensor in header.tensors for part in tensor.name.split(".")]
            hint = nearest(pattern, parts)
            raise OptionError(f"no tensor of {path} has a name with {pattern!r}{hint}")
    for name, kind in (
        ("output.weight", options.output_tensor_type),
        ("token_embd.weight", options.token_embedding_type or options.output_tensor_type),
    ):
        row = next((tensor.shape[0] for tensor in header.tensors if tensor.name == name), 0)
        if kind is not None and row % BLOCK_SIZES[kind]:
            raise OptionError(
                f"{path} has rows of {row} numbers in {name}, which do not divide into {kind}'s "
                "blocks"
            )


def _with_importance(
    options: QuantizeOptions, path: Path, matrix: ImportanceMatrix
) -> QuantizeOptions:
    """Add the matrix, and the metadata by which llama.cpp's own quantizer names it."""
    metadata: dict[str, str | int] = {"quantize.imatrix.file": path.name}
    if matrix.datasets:
        metadata["quantize.imatrix.dataset"] = matrix.datasets[0]
    metadata["quantize.imatrix.entries_count"] = len(matrix.entries)
    if matrix.chunk_count:
        metadata["quantize.imatrix.chunks_count"] = matrix.chunk_count
    return replace(options, importance=matrix.means(), metadata=metadata)


def _write(
    quantizer: QuantizerProcess,
    aside: Path,
    header: GGUFHeader,
    plan: Sequence[_PlannedType],
    progress: Progress | None,
) -> GGUFHeader:
    """Let llama.cpp write, and return the header of its file, which agrees with the plan."""
    done, total = 0, sum(tensor.n_bytes for tensor in header.tensors)
    try:
        for step in _steps(header, quantizer.write(aside)):
            done += step.tensor.n_bytes
            if progress is not None:
                progress(done, total)
        written = read_header(aside)
    except (ModelError, MalformedFileError) as error:
        # llama.cpp gives no reason for a failed write, and goes on after some of them.
        if shutil.disk_usage(aside.parent).free < _HEADER_ROOM:
            raise SpecrunError(
                f"the disk of {aside.parent} is full: nothing was written; free some space"
            ) from error
        if isinstance(error, MalformedFileError):
            raise SpecrunError(
                f"llama.cpp could not write all of the file into {aside.parent}: is there a "
                "limit on its size?"
            ) from error
        raise
    promised = {
        planned.tensor.name: (_sizes(planned.tensor), planned.type_name) for planned in plan
    }
    if {tensor.name: (_sizes(tensor), tensor.type_name) for tensor in written.tensors} != promised:
        raise SpecrunError(
            f"llama.cpp wrote other tensors than it planned for {aside.name}: quantize again"
        )
    return written


def _sizes(tensor: TensorInfo) -> tuple[int, ...]:
    """Return a tensor's shape without the dimensions of 1 at its end, which llama.cpp drops."""
    sizes = [*tensor.shape]
    while len(sizes) > 1 and sizes[-1] == 1:
        sizes.pop()
    return tuple(sizes)


def quantization_report(
    target: Path,
    name: str,
    source: GGUFHeader,
    matrices: Iterable[TensorInfo],
    n_without_importance: int = 0,
) -> QuantizationReport:
    """Return the report of the file `target`, whose `matrices` were to become the type `name`."""
    written = read_header(target)
    block = 1 if name == COPY else BLOCK_SIZES[FILE_TYPES[name].base_type]
    return QuantizationReport(
        output=target,
        file_type=name,
        source_bytes=source.file_size,
        n_bytes=written.file_size,
        n_parameters=written.n_parameters,
        bits_per_weight=written.bits_per_weight,
        tensor_types=written.tensor_type_counts,
        shares=_share_types(written),
        n_substituted=sum(tensor.shape[0] % block != 0 for tensor in matrices),
        n_without_importance=n_without_importance,
    )
