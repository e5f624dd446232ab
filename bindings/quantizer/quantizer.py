"""llama.cpp's quantizer: its file types, its calls, and a process of its own for it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.bindings.errors import ModelError, OptionError, OutOfMemoryError
from specrun.bindings.gguf import FILE_TYPE_NAMES, TENSOR_TYPES
from specrun.bindings.library import last_native_errors, llama
from specrun.bindings.threads import available_cores

# == File types (llama_ftype): numbers, sizes, need of importance ==================================


class FileType(NamedTuple):
    """A file type: llama.cpp's number (llama_ftype), the type of most matrices, and its size.

    `bits_per_weight` is that of a Llama of 8 billion parameters (the shapes of Llama-3.1-8B), as
    the quantizer's own dry run counts it with an importance matrix. `needs_importance`:
    such a model cannot be made without one.
    """

    number: int
    base_type: str
    bits_per_weight: float
    needs_importance: bool = False


COPY = "COPY"
"""In place of a file type: copy every tensor as it is."""

# Name, type of most matrices and bits per weight; ! marks those that need an importance matrix.
_TABLE = """
    F32 F32 32.0, F16 F16 16.0, BF16 BF16 16.0, Q8_0 Q8_0 8.5, Q6_K Q6_K 6.56, Q5_K_M Q5_K 5.7,
    Q5_K_S Q5_K 5.57, Q5_1 Q5_1 6.04, Q5_0 Q5_0 5.59, Q4_K_M Q4_K 4.89, Q4_K_S Q4_K 4.67,
    Q4_1 Q4_1 5.1, Q4_0 Q4_0 4.65, IQ4_NL IQ4_NL 4.65, IQ4_XS IQ4_XS 4.42, MXFP4_MOE MXFP4 8.5,
    Q3_K_L Q3_K 4.3, Q3_K_M Q3_K 4.0, Q3_K_S Q3_K 3.64, IQ3_M IQ3_S 3.76, IQ3_S IQ3_S 3.66,
    IQ3_XS IQ3_S 3.5 !, IQ3_XXS IQ3_XXS 3.25 !, Q2_K Q2_K 3.16, Q2_K_S Q2_K 2.97 !,
    IQ2_M IQ2_S 2.93 !, IQ2_S IQ2_XS 2.74 !, IQ2_XS IQ2_XS 2.59 !, IQ2_XXS IQ2_XXS 2.38 !,
    Q2_0 Q2_0 2.68, TQ2_0 TQ2_0 2.52, TQ1_0 TQ1_0 2.19, IQ1_M IQ1_M 2.15 !, IQ1_S IQ1_S 2.0 !,
    Q1_0 Q1_0 1.48
"""


def _file_types() -> Iterator[tuple[str, FileType]]:
    numbers = {name: number for number, name in FILE_TYPE_NAMES.items()}
    for row in _TABLE.split(","):
        name, base, bits, *mark = row.split()
        yield name, FileType(numbers[name], base, float(bits), bool(mark))


FILE_TYPES: Mapping[str, FileType] = MappingProxyType(dict(_file_types()))
"""Every file type the quantizer offers, from large to small within a kind."""

FILE_TYPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
)
"""Other names that llama.cpp's quantizer takes."""

# The types of ggml_quantize_chunk: it aborts for any other, such as the types of activations.
_NOT_FOR_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
_OF_WEIGHTS = {
    kind.name: code for code, kind in TENSOR_TYPES.items() if kind.name not in _NOT_FOR_WEIGHTS
}
TENSOR_NUMBERS: Mapping[str, int] = MappingProxyType(_OF_WEIGHTS)
"""The tensor types that weights can be stored in, with ggml's number of each."""

# Too few bits to be chosen well without statistics: llama.cpp refuses them for all but the token
# matrices, for which those that always need them fail an assertion of ggml's.
WITH_IMPORTANCE = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"))
"""Types of matrices that need an importance matrix, unless they are TOKEN_MATRICES."""
ALWAYS_WITH_IMPORTANCE = frozenset(("IQ1_S", "IQ2_XXS", "IQ2_XS"))
"""Types that ggml makes with an importance matrix only (ggml_quantize_requires_imatrix)."""
TOKEN_MATRICES = frozenset(("token_embd.weight", "per_layer_token_embd.weight", "output.weight"))
"""Token embedding and output matrices: by default, importance matrices have no entries for them."""


def needs_importance(tensor: str, type_name: str, file_type: str) -> bool:
    """Return whether llama.cpp stores this tensor so only with an importance matrix for it."""
    if tensor in TOKEN_MATRICES:
        return type_name in ALWAYS_WITH_IMPORTANCE
    return type_name in WITH_IMPORTANCE or (type_name == "Q2_K" and file_type == "Q2_K_S")


# == Quantization of a GGUF file ===================================================================


MAX_THREADS = 1024
_MOST_TEXT = 127  # bytes of a metadata value that llama_model_kv_override can hold
_INTEGER_VALUE, _TEXT_VALUE = 0, 3  # llama_model_kv_override_type

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of llama.cpp's quantizer; names of types are upper-case, as in FILE_TYPES.

    `file_type` is one of FILE_TYPES, or COPY. `pure` gives every matrix its base type instead of
    llama.cpp's mix. `output_tensor_type` and `token_embedding_type` are tensor types for the token
    embedding and output matrices; `leave_output_tensor` keeps `output.weight` as it is.
    `tensor_types` are pairs of a regular expression (ECMAScript, searched in names, the first that
    matches decides) and a tensor type. `importance` has the mean square of every input of a matrix,
    by the matrix's name: float32 of shape [row length], or [experts * row length]. `metadata` is
    written into the new file: texts of up to 127 bytes, whole numbers. `buffer_bytes` is about how
    much memory rows may take while they are converted; 0: llama.cpp's own 8 GiB, in effect a
    whole tensor. The written file does not depend on it.
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
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None, options: QuantizeOptions
) -> None:
    """Write the GGUF file `source` with `options` to `output`, which is overwritten.

    The source's header must have been checked (`read_header`): native code reads the file, and an
    assertion that fails in it ends the process (`QuantizerProcess` runs this in another).
    llama.cpp's log has a line for each tensor; without an `output` it only logs its steps (and a
    missing importance matrix), and reads no weights. Raises ModelError with llama.cpp's reason if
    it fails, which leaves a partial `output`.
    """
    native = llama()
    params, kept = _native_params(options)
    params.dry_run = output is None
    last_native_errors()
    files = os.fsencode(source), os.fsencode(os.devnull if output is None else output)
    code = native.llama_model_quantize(*files, ctypes.byref(params))
    del kept  # lived as long as native code could read it
    if code != 0:
        reason = last_native_errors() or f"llama_model_quantize returned {code}"
        reason = reason.removeprefix("llama_model_quantize: failed to quantize: ")
        problem = f"llama.cpp cannot quantize {os.fspath(source)} to {options.file_type}"
        raise ModelError(f"{problem}: {reason}")


def _native_params(options: QuantizeOptions) -> tuple[Any, list[FloatArray]]:
    """Return llama_model_quantize_params, and the numbers whose memory it points to.

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
    kept: list[FloatArray] = []
    if options.tensor_types:
        types = (native.llama_model_tensor_override * (len(options.tensor_types) + 1))()
        for entry, (pattern, kind) in zip(types, options.tensor_types, strict=False):
            entry.pattern, entry.type = pattern.encode(), TENSOR_NUMBERS[kind]
        params.tt_overrides = types
    if options.importance:
        matrices = (native.llama_model_imatrix_data * (len(options.importance) + 1))()
        for entry, (name, values) in zip(matrices, options.importance.items(), strict=False):
            kept.append(np.ascontiguousarray(values, np.float32).reshape(-1))
            entry.name, entry.size = name.encode(), kept[-1].size
            entry.data = kept[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = matrices
    if options.metadata:
        pairs = (native.llama_model_kv_override * (len(options.metadata) + 1))()
        for entry, (key, value) in zip(pairs, options.metadata.items(), strict=False):
            entry.key = key.encode()
            if isinstance(value, int):
                entry.tag, entry.value.val_i64 = _INTEGER_VALUE, value
            else:
                # Cut between characters, not within one.
                text = value.encode()[:_MOST_TEXT].decode("utf-8", "ignore")
                entry.tag, entry.value.val_str = _TEXT_VALUE, text.encode()
        params.kv_overrides = pairs
    return params, kept


# == A process of its own ==========================================================================
#
# The native call cannot be interrupted, and a failed assertion in it ends its process. In another
# process both are harmless: Ctrl-C ends that one at once, and a crash becomes an error.


logger = logging.getLogger("specrun.llama")


class QuantizerProcess:
    """One quantization: `plan()`, then `write()`; a context manager that ends the process.

    Both yield llama.cpp's log line by line as it comes. If this process is killed before
    `close()`, the other one removes its file; so a file should get its final name before.
    Raises ModelError if llama.cpp fails or crashes, OutOfMemoryError if the other process was
    killed for its memory.
    """

    def __init__(self, source: str | os.PathLike[str], options: QuantizeOptions) -> None:
        self._source, self._options = os.fspath(source), options
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "specrun.bindings.quantizer.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"},
        )

    def __enter__(self) -> QuantizerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, whatever it is doing; calling it again does nothing."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # Unsent input has no reader any more.
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.wait()

    def plan(self) -> Iterator[str]:
        """Let llama.cpp log its plan, line by line; nothing is written."""
        names = [entry.name for entry in dataclasses.fields(self._options)]
        values = {name: getattr(self._options, name) for name in names}
        importance = values.pop("importance")
        values["metadata"] = dict(values["metadata"])
        sizes = [(name, int(np.size(numbers))) for name, numbers in importance.items()]
        job = {"source": self._source, "options": values, "importance": sizes}
        self._send(json.dumps(job).encode() + b"\n", *importance.values())
        return self._lines_until("planned")

    def write(self, output: str | os.PathLike[str]) -> Iterator[str]:
        """Write the file `output`, which is overwritten, yielding llama.cpp's log line by line.

        A partial file is left behind on failure.
        """
        self._send(json.dumps(os.fspath(output)).encode() + b"\n")
        return self._lines_until("written")

    def _send(self, *parts: Any) -> None:  # noqa: ANN401 - bytes or arrays
        stream = self._process.stdin
        assert stream is not None
        try:
            for part in parts:
                if not isinstance(part, bytes):
                    part = np.ascontiguousarray(part, np.float32).tobytes()
                stream.write(part)
            stream.flush()
        except BrokenPipeError:
            pass  # it ended: its last words have the reason

    def _lines_until(self, step: str) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "log" in event:
                logger.log(event["level"], "%s", event["log"])
                yield event["log"]
            elif event.get("step") == step:
                return
            elif event.get("memory"):
                raise OutOfMemoryError(f"no memory to quantize {self._source}")
            else:
                raise ModelError(event["error"])
        raise self._ended()

    def _ended(self) -> Exception:
        code = self._process.wait()
        if code == -getattr(signal, "SIGKILL", 9):
            problem = f"the process that quantizes {self._source} was killed"
            return OutOfMemoryError(f"{problem}, perhaps for its memory")
        return ModelError(f"llama.cpp crashed while quantizing {self._source} (exit code {code})")
