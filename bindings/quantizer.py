"""llama.cpp's quantizer: one GGUF file to another with smaller numbers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from specrun.bindings.devices import available_cores
from specrun.bindings.errors import ModelError, OptionError
from specrun.bindings.gguf_types import FILE_TYPE_NAMES
from specrun.bindings.library import last_native_errors, llama

__all__ = ["FILE_TYPES", "quantize_file"]

# Left out: what needs statistics of the activations (an importance matrix) or a model trained for the type.
_NEED_MORE = ("IQ", "MXFP4", "NVFP4", "Q2_K_S", "TQ", "Q1_0", "Q2_0")

FILE_TYPES: Mapping[str, int] = {
    name: number for number, name in FILE_TYPE_NAMES.items() if not name.startswith(_NEED_MORE)
}
"""The file types that can be made from weights alone, with llama.cpp's number of each (llama_ftype)."""


def quantize_file(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    file_type: str,
    *,
    n_threads: int = 0,
    pure: bool = False,
    allow_requantize: bool = False,
) -> None:
    """Write the GGUF file `source` as `file_type`, one of FILE_TYPES, to `output`, over what is there.

    `n_threads` 0 means as many as cores. `pure` gives every matrix the same type instead of llama.cpp's mix;
    `allow_requantize` accepts matrices that are quantized already. The source's header must have been checked
    (`read_header`): native code reads the file. Raises ModelError with llama.cpp's reason if it fails, which
    leaves a partial `output`.
    """
    if file_type not in FILE_TYPES:
        raise OptionError(f"the file type is {file_type!r}: use one of {', '.join(FILE_TYPES)}")
    if not 0 <= n_threads <= 1024:
        raise OptionError(f"n_threads is {n_threads}: give 0 (as many as cores) to 1024")
    native = llama()
    params = native.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type]
    params.nthread = n_threads or available_cores()
    params.pure = pure
    params.allow_requantize = allow_requantize
    last_native_errors()
    code = native.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params))
    if code != 0:
        reason = last_native_errors() or f"llama_model_quantize returned {code}"
        raise ModelError(f"llama.cpp cannot quantize {os.fspath(source)} to {file_type}: {reason}")
