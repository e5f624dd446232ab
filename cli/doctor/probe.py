"""Probes of `specrun doctor`: native code in a process of its own, which it may kill.

    python -m specrun.cli.doctor.probe engine            versions, devices and instruction sets
    python -m specrun.cli.doctor.probe kernels Q8_0      evaluate a tiny model quantized to a type
    python -m specrun.cli.doctor.probe file target.gguf  evaluate a model file

Prints one JSON object; an error becomes {"error": message}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.bindings.errors import SpecrunError

if TYPE_CHECKING:
    from specrun.bindings.machine.devices import Device

# More than a block of prompt tokens: matrix products and single rows use different kernels.
_PROMPT_TOKENS = 48


def main(arguments: list[str]) -> None:
    """Print the answer to one question."""
    try:
        print(json.dumps(_answer(*arguments)))
    except (SpecrunError, ImportError, OSError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


def _answer(question: str, subject: str = "") -> dict[str, Any]:
    if question == "engine":
        return _engine()
    if question == "kernels":
        return _kernels(subject)
    return _evaluate(Path(subject))


def _engine() -> dict[str, Any]:
    from specrun.bindings.library import engine_versions, has_function
    from specrun.bindings.machine.devices import (
        built_backends,
        describe_backends,
        devices,
        supports_gpu_offload,
        system_info,
    )
    from specrun.bindings.threads import describe_waiting, find_processors

    processors = find_processors()
    # LLVM's OpenMP answers to GNU's names, too.
    has_libgomp = has_function("GOMP_parallel") and not has_function("__kmpc_fork_call")
    found = devices()
    return {
        "versions": engine_versions(),
        "devices": [_shown(device) for device in found],
        "backends": describe_backends(built_backends(), found),
        "features": system_info(),
        "processors": str(processors),
        "threads": processors.n_threads,
        "waiting": describe_waiting(has_libgomp=has_libgomp),
        "gpu_offload": supports_gpu_offload(),
    }


def _shown(device: Device) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(device).items() if key != "handle"}


def _kernels(file_type: str) -> dict[str, Any]:
    from specrun.convert.quantize import quantize_model
    from specrun.convert.random_model import RandomLlama, write_random_llama

    with tempfile.TemporaryDirectory(prefix="specrun-doctor-") as folder:
        plain, quantized = Path(folder, "plain.gguf"), Path(folder, "quantized.gguf")
        shape = RandomLlama(vocab_size=512, width=256, ffn=256, layers=1, context=256)
        write_random_llama(plain, shape)
        quantize_model(plain, quantized, file_type, n_threads=1, pure=True)
        return _evaluate(quantized)


def _evaluate(path: Path) -> dict[str, Any]:
    from specrun.bindings.contexts.context_options import ContextOptions
    from specrun.runtime import Runtime, SamplingParams

    context = ContextOptions(n_ctx=256, n_threads=1, n_threads_batch=1)
    # This process may end as a trial's may, so it needs no trial.
    with Runtime(path, context=context, n_gpu_layers=0, trust=True) as runtime:
        prompt = [token % runtime.vocabulary.size for token in range(_PROMPT_TOKENS)]
        result = runtime.generate(prompt, SamplingParams(temperature=0), max_tokens=4)
        return {"tokens": len(result.token_ids)}


if __name__ == "__main__":
    main(sys.argv[1:])
