"""llama.cpp's quantizer: one GGUF file to another with smaller numbers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import ModelError, OptionError
from specrun.bindings.library import last_native_errors, llama
from specrun.bindings.quantizer.types import COPY, FILE_TYPES, TENSOR_NUMBERS
from specrun.bindings.threads import available_cores

MAX_THREADS = 1024
_MOST_TEXT = 127  # bytes of a metadata value that llama_model_kv_override can hold
_INTEGER_VALUE, _TEXT_VALUE = 0, 3  # llama_model_kv_override_type

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What llama.cpp's quantizer is asked for; names of types are upper-case, as in FILE_TYPES.

    `file_type` is one of FILE_TYPES, or COPY. `pure` gives every matrix its base type instead of
    llama.cpp's mix. `output_tensor_type` and `token_embedding_type` are tensor types for the token
    embedding and output matrices; `leave_output_tensor` keeps `output.weight` as it is.
    `tensor_types` are pairs of a regular expression (ECMAScript, searched in names, the first that
    matches decides) and a tensor type. `importance` has the mean square of every input of a matrix,
    by the matrix's name: float32 of shape [row length], or [experts * row length]. `metadata` is
    written into the new file: texts of up to 127 bytes, whole numbers. `buffer_bytes` is about how
    much memory rows may take while they are converted; 0: llama.cpp's own 8 GiB, which is to say a
    whole tensor. What is written does not depend on it.
    """

    file_type: str
    n_threads: int = 0
    pure: bool = False
    allow_requantize: bool = False
    leave_output_tensor: bool = False
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    tensor_types: tuple[tuple[str, str], ...] = ()
    importance: Mapping[str, FloatArray] = field(default_factory=dict)
    metadata: Mapping[str, str | int] = field(default_factory=dict)
    buffer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.file_type not in FILE_TYPES and self.file_type != COPY:
            known = ", ".join((*FILE_TYPES, COPY))
            raise OptionError(f"the file type is {self.file_type!r}: use one of {known}")
        if not 0 <= self.n_threads <= MAX_THREADS:
            advice = f"give 0 (as many as cores) to {MAX_THREADS}"
            raise OptionError(f"n_threads is {self.n_threads}: {advice}")
        kinds = (
            self.output_tensor_type,
            self.token_embedding_type,
            *(kind for _, kind in self.tensor_types),
        )
        for kind in kinds:
            if kind is not None and kind not in TENSOR_NUMBERS:
                known = ", ".join(TENSOR_NUMBERS)
                raise OptionError(f"the tensor type is {kind!r}: use one of {known}")
        if not 0 <= self.buffer_bytes < 2**63:
            advice = "give 0 (llama.cpp's own) or more"
            raise OptionError(f"buffer_bytes is {self.buffer_bytes}: {advice}")
        if any(not pattern or "\0" in pattern for pattern, _ in self.tensor_types):
            problem = "the name in a tensor type is empty: give NAME=TYPE, such as attn_v=Q8_0"
            raise OptionError(problem)


def quantize_file(
    source: str | os.PathLike[str], output: str | os.PathLike[str], options: QuantizeOptions
) -> None:
    """Write the GGUF file `source` as `options` say to `output`, over what is there.

    The source's header must have been checked (`read_header`): native code reads the file, and an
    assertion that fails in it ends the process (`QuantizerProcess` runs this in another).
    llama.cpp's log has a line for each tensor. Raises ModelError with llama.cpp's reason if it
    fails, which leaves a partial `output`.
    """
    _run(source, output, options, dry=False)


def plan_quantization(source: str | os.PathLike[str], options: QuantizeOptions) -> None:
    """Let llama.cpp log what `quantize_file` would do, without reading weights or writing anything.

    Raises ModelError with llama.cpp's reason if it would fail; a missing importance matrix is only
    logged.
    """
    _run(source, os.devnull, options, dry=True)


def _run(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: QuantizeOptions,
    *,
    dry: bool,
) -> None:
    native = llama()
    params, kept = _native_params(options)
    params.dry_run = dry
    last_native_errors()
    files = os.fsencode(source), os.fsencode(output)
    code = native.llama_model_quantize(*files, ctypes.byref(params))
    del kept  # lived as long as native code could read it
    if code != 0:
        reason = last_native_errors() or f"llama_model_quantize returned {code}"
        reason = reason.removeprefix("llama_model_quantize: failed to quantize: ")
        problem = f"llama.cpp cannot quantize {os.fspath(source)} to {options.file_type}"
        raise ModelError(f"{problem}: {reason}")


def _native_params(options: QuantizeOptions) -> tuple[Any, list[object]]:
    """Return llama_model_quantize_params, and the objects whose memory it points to.

    In llama.cpp 0.5 the lists are plain C arrays, each ended by an empty entry (before, they were
    pointers to C++ containers); the version is pinned, and `test_library.py` holds the layout.
    """
    native = llama()
    params = native.llama_model_quantize_default_params()
    if options.file_type == COPY:
        params.only_copy = True
    else:
        params.ftype = FILE_TYPES[options.file_type].number
    if options.buffer_bytes:
        params.max_buf_size = options.buffer_bytes
    params.nthread = options.n_threads or available_cores()
    params.pure = options.pure
    params.allow_requantize = options.allow_requantize
    params.quantize_output_tensor = not options.leave_output_tensor
    if options.output_tensor_type is not None:
        params.output_tensor_type = TENSOR_NUMBERS[options.output_tensor_type]
    if options.token_embedding_type is not None:
        params.token_embedding_type = TENSOR_NUMBERS[options.token_embedding_type]
    kept: list[object] = []
    if options.tensor_types:
        params.tt_overrides = _tensor_overrides(native, options.tensor_types, kept)
    if options.importance:
        params.imatrix = _importance_entries(native, options.importance, kept)
    if options.metadata:
        params.kv_overrides = _metadata_entries(native, options.metadata, kept)
    return params, kept


def _tensor_overrides(native: Any, pairs: tuple[tuple[str, str], ...], kept: list[object]) -> Any:  # noqa: ANN401
    entries = (native.llama_model_tensor_override * (len(pairs) + 1))()
    for entry, (pattern, kind) in zip(entries, pairs, strict=False):
        entry.pattern, entry.type = pattern.encode(), TENSOR_NUMBERS[kind]
    kept.append(entries)
    return ctypes.cast(entries, ctypes.POINTER(native.llama_model_tensor_override))


def _importance_entries(
    native: Any,  # noqa: ANN401
    importance: Mapping[str, FloatArray],
    kept: list[object],
) -> Any:  # noqa: ANN401
    entries = (native.llama_model_imatrix_data * (len(importance) + 1))()
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        kept.append(flat)
        entry.name, entry.size = name.encode(), flat.size
        entry.data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    kept.append(entries)
    return ctypes.cast(entries, ctypes.POINTER(native.llama_model_imatrix_data))


def _metadata_entries(native: Any, metadata: Mapping[str, str | int], kept: list[object]) -> Any:  # noqa: ANN401
    entries = (native.llama_model_kv_override * (len(metadata) + 1))()
    for entry, (key, value) in zip(entries, metadata.items(), strict=False):
        entry.key = key.encode()
        if isinstance(value, int):
            entry.tag, entry.value.val_i64 = _INTEGER_VALUE, value
        else:
            # Cut between characters, not within one.
            text = value.encode()[:_MOST_TEXT].decode("utf-8", "ignore")
            entry.tag, entry.value.val_str = _TEXT_VALUE, text.encode()
    kept.append(entries)
    return ctypes.cast(entries, ctypes.POINTER(native.llama_model_kv_override))
