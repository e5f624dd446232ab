"""`specrun doctor`: checks of this installation and this machine, each in a process of its own."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import click

from specrun.bindings.errors import SpecrunError
from specrun.bindings.installation import build_command, extra_command
from specrun.cli.options.group import SectionedCommand
from specrun.cli.options.output import json_option, terminal_options
from specrun.cli.terminal.screen import bytes_text, print_facts, print_table
from specrun.cli.terminal.terminal import Terminal, one_line
from specrun.runtime.demo import demo_target

# == Diagnosis =====================================================================================


def specrun_version() -> str:
    """Return the installed version of specrun."""
    return importlib.metadata.version("specrun")


def version_lines() -> list[str]:
    """Return versions and backends; loads llama.cpp, as only the library has its commit."""
    from specrun.bindings.library import engine_versions
    from specrun.bindings.machine.devices import built_backends

    lines = [f"specrun {specrun_version()}"]
    lines += [f"{name} {one_line(version)}" for name, version in engine_versions().items()]
    return [*lines, f"backends {', '.join(sorted(built_backends()))}"]


KERNEL_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
_TIMEOUT_S = 120
_ILLEGAL_INSTRUCTIONS = {-getattr(signal, "SIGILL", 4), 0xC000001D, -1073741795}
_REBUILD = (
    "rebuild llama-cpp-python with CFLAGS and CXXFLAGS set to "
    '"-mno-amx-tile -mno-amx-int8 -mno-amx-bf16", or for any processor: '
    f"{build_command('make chat', 'GGML_NATIVE=OFF')}"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `remedy` is the advice after a failure."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    detail: str
    remedy: str = ""


def diagnose() -> dict[str, Any]:
    """Examine this installation and this machine; return the findings, ready for JSON."""
    engine, check = _ask("llama.cpp loads", "engine")
    checks = [check]
    if check.state == "ok" and find_spec("gguf") is not None:
        checks += [_ask(f"{kind} kernels", "kernels", kind)[1] for kind in KERNEL_TYPES]
    elif check.state == "ok":
        missing = f"needs the package gguf: {extra_command('convert')}"
        checks.append(Check("quantized kernels", "skipped", missing))
    checks.append(_demo_check(check))
    machine = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    if engine:
        machine["processors"] = f"{engine['processors']}{_load()}"
        machine["threads"] = f"{engine['threads']}, waiting by {engine['waiting']}"
        machine["CPU features"] = _features(engine["features"])
        machine["GPU offload"] = "yes" if engine["gpu_offload"] else "no"
    return {
        "versions": {
            "specrun": specrun_version(),
            "Python": platform.python_version(),
            **engine.get("versions", {}),
        },
        "machine": machine,
        "backends": engine.get("backends", {}),
        "devices": engine.get("devices", []),
        "checks": [dataclasses.asdict(check) for check in checks],
        "healthy": all(check.state != "failed" for check in checks),
    }


def _demo_check(engine: Check) -> Check:
    name = "embedded models"
    if not demo_target().is_file():
        return Check(name, "skipped", "not part of this installation; name a model with -m")
    if engine.state != "ok":
        return Check(name, "skipped", "llama.cpp does not load")
    started = time.perf_counter()
    check = _ask(name, "file", str(demo_target()))[1]
    seconds = time.perf_counter() - started
    if check.state != "ok":
        return check
    # The probe is a trial (`bindings.trial`).
    cost = f"the first opening of a file adds {seconds:.1f} s here, more for a large one (--trust)"
    return dataclasses.replace(check, detail=cost)


def _ask(name: str, *question: str) -> tuple[dict[str, Any], Check]:
    """Return a probe's answer, {} if it failed, and its check."""
    command = [sys.executable, "-m", "specrun.cli.doctor", *question]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"no answer within {_TIMEOUT_S} s"
        return {}, Check(name, "failed", detail, "end other programs that use the processor")
    return interpret(name, done.returncode, done.stdout, done.stderr)


def interpret(
    name: str, exit_code: int, output: bytes, messages: bytes
) -> tuple[dict[str, Any], Check]:
    """Return a probe's answer, and the check called `name` that follows from its exit code."""
    if exit_code in _ILLEGAL_INSTRUCTIONS:
        detail = "illegal instruction: llama.cpp was built for another processor"
        return {}, Check(name, "failed", detail, _REBUILD)
    try:
        answer = json.loads(output)
    except ValueError:
        lines = messages.decode("utf-8", "replace").strip().splitlines()
        detail = f"died ({_ending(exit_code)})" + (f": {lines[-1]}" if lines else "")
        return {}, Check(name, "failed", detail, "install llama-cpp-python again: see the README")
    if "error" in answer:
        remedy = "install specrun and llama-cpp-python again: see the README"
        return {}, Check(name, "failed", answer["error"], remedy)
    return answer, Check(name, "ok", "")


def _load() -> str:
    """Return how many processes need a processor, on average of the last minute."""
    with suppress(AttributeError, OSError):  # not every system has it
        return f", load {os.getloadavg()[0]:.1f}"
    return ""


def _ending(exit_code: int) -> str:
    with suppress(ValueError):  # a number that is no signal's
        if exit_code < 0:
            return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _features(line: str) -> str:
    """Return the instruction sets of llama.cpp's line "CPU : AVX = 1 | AVX2 = 1 | ... "."""
    parts = [part.rpartition(":")[2].strip() for part in line.split("|")]
    return " ".join(part.removesuffix(" = 1") for part in parts if part.endswith("= 1"))


_EPILOG = """\b
Examples:
  specrun doctor
  specrun doctor --json > report.json      to attach to a bug report

Exit code 1 if something is broken.
"""


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@terminal_options
@json_option()
def doctor(terminal: Terminal) -> None:
    """Check this installation and this machine.

    Quantized kernels are tried in processes of their own, so that a processor that lacks an
    instruction is reported instead of ending the program.
    """
    with terminal.meanwhile("looking around, a few seconds ..."):
        diagnosis = diagnose()
    if terminal.as_json:
        terminal.answer_json(diagnosis)
    else:
        _print(terminal, diagnosis)
    if not diagnosis["healthy"]:
        click.get_current_context().exit(1)


def _print(terminal: Terminal, diagnosis: dict[str, Any]) -> None:
    for title in ("versions", "machine", "backends"):
        if diagnosis[title]:
            print_facts(terminal, title, diagnosis[title])
    devices = [
        (
            *(device[field] for field in ("name", "description", "kind")),
            *(bytes_text(device[field]) for field in ("memory_free", "memory_total")),
        )
        for device in diagnosis["devices"]
    ]
    if devices:
        print_table(terminal, "devices", ("name", "description", "kind", "free", "memory"), devices)
    rows = [
        [check[field] for field in ("name", "state", "detail")] for check in diagnosis["checks"]
    ]
    print_table(terminal, "checks", ("check", "state", ""), rows)
    for check in diagnosis["checks"]:
        if check["remedy"]:
            terminal.warn(f"{check['name']}: {check['remedy']}")
    verdict = "Nothing is broken." if diagnosis["healthy"] else "Something is broken: see above."
    terminal.answer(f"{verdict}\n")


# == Probes of `specrun doctor`: native code in a process of its own, which it may kill ============
#
#     python -m specrun.cli.doctor engine            versions, devices and instruction sets
#     python -m specrun.cli.doctor kernels Q8_0      evaluate a tiny model quantized to a type
#     python -m specrun.cli.doctor file target.gguf  evaluate a model file
#
# Prints one JSON object; an error becomes {"error": message}.


# More than a block of prompt tokens: matrix products and single rows use different kernels.
_PROMPT_TOKENS = 48


def main(question: str, subject: str = "") -> None:
    """Print the answer to one question."""
    try:
        if question == "engine":
            answer = _engine()
        elif question == "kernels":
            answer = _kernels(subject)
        else:
            answer = _evaluate(Path(subject))
        print(json.dumps(answer))
    except (SpecrunError, ImportError, OSError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


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
    facts = [dataclasses.asdict(device) for device in found]
    return {
        "versions": engine_versions(),
        "devices": [{key: fact[key] for key in fact if key != "handle"} for fact in facts],
        "backends": describe_backends(built_backends(), found),
        "features": system_info(),
        "processors": str(processors),
        "threads": processors.n_threads,
        "waiting": describe_waiting(has_libgomp=has_libgomp),
        "gpu_offload": supports_gpu_offload(),
    }


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
    with Runtime(path, "none", context=context, n_gpu_layers=0, trust=True) as runtime:
        prompt = [token % runtime.vocabulary.size for token in range(_PROMPT_TOKENS)]
        result = runtime.generate(prompt, SamplingParams(temperature=0), max_tokens=4)
        return {"tokens": len(result.token_ids)}


if __name__ == "__main__":
    main(*sys.argv[1:])
