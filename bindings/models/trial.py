"""Trials: the first opening of an unknown file, in a process that may die of it.

llama.cpp fails an assertion for many values of a damaged or hostile file, which ends the process.
`model_checks` has the known ones; no list is complete, so a file that was not seen before is loaded
and evaluated in another process first, bounded in time and memory, without a GPU. A file that
passes is remembered by its size, its time and the digest of its header, wherever it lies; so are
files that specrun itself has written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelLoadError, OutOfMemoryError, SpecrunError
from specrun.bindings.files import cache_folder
from specrun.bindings.gguf import MAX_HEADER_BYTES, GGUFHeader, read_header
from specrun.bindings.models.nextn import split_paths

logger = logging.getLogger("specrun.trial")

_FORMAT = 1  # to be raised when trials try more than before
_SPARE_BYTES = 1 << 30  # in addition to the weights: Python, the vocabulary, a context of 256 cells
_SPARE_S = 120.0  # a busy machine may need many seconds to import alone
_BYTES_PER_S = 20e6  # slower than any disk that is in order
_MESSAGE = b'{"trial": '
# A GPU that a trial does not use takes a second to open, and memory that others may need.
_NO_GPU = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "-1")
_NO_GPU["GGML_VK_VISIBLE_DEVICES"] = ""
# Kinds of trials: suffixes of a file's key.
_AS_MODEL, _AS_VOCABULARY, _AS_COUNTED = "-model", "-vocabulary", "-counted"
_AS_HEAD = "-head"
_BUILT_IN = re.compile(r"\S*/vendor/llama\.cpp/")
_TRUST = "if you trust its origin, open it with --trust (Python: trust=True)"

_known_here: set[str] = set()  # if nothing can be stored
_own_folders: set[Path] = set()
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@contextmanager
def trusting_files() -> Iterator[None]:
    """Open files without trials, until the end and in this thread: for files known to be safe."""
    before = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(before)


def trust_folder(folder: Path) -> None:
    """Open the files of a folder without trials, in this process: they came with specrun."""
    _own_folders.add(folder.resolve())


def require_tried(
    path: Path, header: GGUFHeader, *, vocab_only: bool = False, only_counts: bool = False
) -> None:
    """Try a model in a process of its own, unless it is known.

    `vocab_only` tries its vocabulary alone. `only_counts` counts its memory and reads no weights,
    so the file may be larger than this machine. Raises ModelLoadError if that process died, with
    its last words, or hung; OutOfMemoryError if it needed more memory than such a file may. A file
    that it refused in order raises nothing here: this process refuses it, too.
    """
    way = _AS_COUNTED if only_counts else _AS_VOCABULARY if vocab_only else _AS_MODEL
    key = _key_if_unknown(path, header, _AS_MODEL, way)
    if key is not None:
        arguments, n_bytes = [os.fspath(path), way], _size(split_paths(path, header))
        if _tried("specrun.bindings.trial_worker", arguments, path, n_bytes):
            _remember(key + way)


def require_tried_head(
    path: Path, header: GGUFHeader, target: Path, target_header: GGUFHeader
) -> None:
    """Try a head with a target in a process of its own, unless the head is known.

    Raises as `require_tried`.
    """
    key = _key_if_unknown(path, header, _AS_HEAD)
    if key is not None:
        arguments = [os.fspath(target), os.fspath(path)]
        n_bytes = _size([path, *split_paths(target, target_header)])
        if _tried("specrun.runtime.engine.trial", arguments, path, n_bytes):
            _remember(key + _AS_HEAD)


def is_known_file(path: Path) -> bool:
    """Whether a file was tried, or written by specrun, or came with it."""
    if _is_own(path):
        return True
    with suppress(OSError, SpecrunError):
        return _is_known(_key(path), _AS_MODEL, _AS_HEAD)
    return False


def remember_written(path: Path) -> None:
    """Take a file that specrun has just written for tried."""
    # A file that cannot be read back was replaced meanwhile: it is tried when it is opened.
    with suppress(OSError, SpecrunError):
        _remember(_key(path))


def is_noted(path: Path, fact: str) -> bool:
    """Whether `note_fact` was called for the file, or for its copy, with this llama.cpp."""
    with suppress(OSError, SpecrunError):
        return _is_remembered(f"{_key(path)}-{fact}")
    return False


def note_fact(path: Path, fact: str) -> None:
    """Remember something that took time to find out of a file; `fact` is part of a file's name."""
    with suppress(OSError, SpecrunError):
        _remember(f"{_key(path)}-{fact}")


# -- known files -----------------------------------------------------------------------------------


def _is_own(path: Path) -> bool:
    return path.parent.resolve() in _own_folders


def _key_if_unknown(path: Path, header: GGUFHeader, *ways: str) -> str | None:
    """Return the key of a file that has to be tried; None if it was, in one of these ways."""
    if _trusting.get() or _is_own(path):
        return None
    key = _key(path, header)
    return None if _is_known(key, *ways) else key


def _key(path: Path, header: GGUFHeader | None = None) -> str:
    """Return a key of a model: size, time and header of all its files."""
    digest = hashlib.sha256(f"{_FORMAT} {_engine_version()}".encode())
    header = header or read_header(path, named=False)
    for part in split_paths(path, header):
        status = part.stat()
        own = header if part == path else read_header(part, named=False)
        digest.update(f" {status.st_size} {status.st_mtime_ns} ".encode())
        n_bytes = min((tensor.offset for tensor in own.tensors), default=MAX_HEADER_BYTES)
        with part.open("rb") as file:
            digest.update(file.read(min(n_bytes, MAX_HEADER_BYTES)))
    return digest.hexdigest()


@functools.cache
def _engine_version() -> str:
    """Return llama.cpp's version: another one may assert on a file that this one accepts."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:  # built under another name
        return "unknown"


def _is_known(key: str, *ways: str) -> bool:
    """Whether specrun wrote a file, or it was tried in one of these ways."""
    return _is_remembered(key, *(key + way for way in ways))


def _is_remembered(*names: str) -> bool:
    if not _known_here.isdisjoint(names):
        return True
    try:
        return any((cache_folder() / "tried" / name).is_file() for name in names)
    except (OSError, RuntimeError):  # no home, or one that cannot be read
        return False


def _remember(key: str) -> None:
    _known_here.add(key)
    # The name is the whole content, so no reader gets half of a file and writers need no lock.
    try:
        folder = cache_folder() / "tried"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / key).touch()
    except (OSError, RuntimeError) as error:
        logger.info(
            "the result of a trial cannot be stored (%s): the file is tried again next time", error
        )


def _size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


# -- the other process -----------------------------------------------------------------------------


def _tried(module: str, arguments: Sequence[str], path: Path, n_bytes: int) -> bool:
    """Run a trial; return whether all went well. False: the file was refused in order.

    A process that cannot be started, or ends before it opens the file, proves nothing about the
    file: then the caller goes on without a trial, with a warning.
    """
    seconds = _SPARE_S + n_bytes / _BYTES_PER_S
    limits = {"memory": n_bytes + _SPARE_BYTES, "seconds": int(seconds)}
    environment = {**os.environ, **_NO_GPU, "GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The working folder may hold anything, so nothing is imported from there (PYTHONSAFEPATH).
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", module, json.dumps(limits), *arguments]
    logger.info("%s is not known: it is tried in another process first", path)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=seconds,
            check=False,
        )
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, output, errors = None, expired.stdout or b"", expired.stderr or b""
    except (OSError, ValueError) as error:
        logger.warning(
            "%s is opened without a trial: no process could be started (%s)", path, error
        )
        return False
    return _judged(code, _reports(output), _last_words(errors), path, seconds)


def _judged(
    code: int | None, reports: dict[str, Any], words: str, path: Path, seconds: float
) -> bool:
    """Return or raise the meaning of a trial's end; `code` None: it was ended for its time."""
    if "opening" not in reports:
        logger.warning("%s is opened without a trial: its process did not start (%s)", path, words)
        return False
    if "memory" in reports:
        problem = f"{path} needs far more memory than its size when it is opened"
        raise OutOfMemoryError(f"{problem}, so it was not: it may be damaged; {_TRUST}")
    if "refused" in reports:
        return False
    if code == 0 and "done" in reports:
        return True
    if code is None or code == -getattr(signal, "SIGXCPU", 24):
        ending = f"did not end in {seconds:.0f} s"
    else:
        ending = f"ended that process ({_ending(code)}" + (f": {words})" if words else ")")
    problem = f"{path} was tried in a process of its own, and {ending}"
    raise ModelLoadError(f"{problem}. It is damaged or made for another llama.cpp; {_TRUST}")


def _reports(output: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(_MESSAGE):
            found |= json.loads(line)["trial"]
    return found


def _last_words(errors: bytes) -> str:
    """Return the assertion that failed, or else the last line: readable, and of one line's size."""
    lines = [line.strip() for line in errors.decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "error" in line.lower()]
    # Source paths of the build machine mean nothing.
    text = _BUILT_IN.sub("", (asserted or lines or [""])[-1])[:200]
    return text if text.isprintable() else repr(text)


def _ending(code: int) -> str:
    try:
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    except ValueError:  # a number that is no signal's
        return f"signal {-code}"


def report(**what: object) -> None:
    """Report to the process that started the trial: called in the other one."""
    # On a line of its own, whatever native code has written before.
    os.write(1, b"\n" + _MESSAGE + json.dumps(what).encode() + b"}\n")
