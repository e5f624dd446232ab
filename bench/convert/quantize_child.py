"""The process that `model_to_q4_k_m` measures: quantizes one model, as specrun or by llama.cpp's
call alone."""

from __future__ import annotations

import json
import os
import sys
import time

from specrun.bench.convert.child import peak_memory
from specrun.bench.convert.model_to_q4_k_m import FILE_TYPE
from specrun.bindings.library import llama
from specrun.bindings.quantizer import QuantizeOptions, quantize_file
from specrun.convert.quantize import quantize_model


def _main(how: str, source: str, output: str, n_threads: str) -> None:
    if how == "direct":
        llama()
    started = time.perf_counter()
    if how == "direct":
        quantize_file(source, output, QuantizeOptions(FILE_TYPE, n_threads=int(n_threads)))
        descriptor = os.open(output, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)
    else:
        quantize_model(source, output, FILE_TYPE, n_threads=int(n_threads))
    seconds = time.perf_counter() - started
    peak = peak_memory() + _peak_of_children()
    os.write(1, json.dumps({"seconds": seconds, "peak_bytes": peak}).encode() + b"\n")


def _peak_of_children() -> int:
    """Return the largest resident set of any process this one started, 0 if it started none, in
    bytes."""
    import resource

    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


if __name__ == "__main__":
    _main(*sys.argv[1:])
