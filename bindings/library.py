"""The native library: loaded on first use, initialised once, its log routed to Python's logging."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from specrun.bindings.errors import UnsupportedModelError

logger = logging.getLogger("specrun.llama")
# Without a handler somewhere, Python's last-resort handler would write llama.cpp's warnings to
# stderr: the library is silent unless the application configures logging.
logging.getLogger("specrun").addHandler(logging.NullHandler())

# ggml_log_level -> logging level; 5 continues the previous line.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
_recent_errors: deque[str] = deque(maxlen=8)
_keep_alive: list[object] = []  # llama.cpp keeps the callback's pointer for the life of the process


class _LogRouter:
    """Joins llama.cpp's partial lines and hands whole ones to logging."""

    def __init__(self) -> None:
        self.level = logging.INFO
        self.parts: list[str] = []

    def __call__(self, level: int, text: bytes | None, _data: object) -> None:
        if level != _CONTINUE:
            self.level = _LEVELS.get(level, logging.DEBUG)
        self.parts.append((text or b"").decode("utf-8", "replace"))
        if not self.parts[-1].endswith("\n"):
            return
        line = "".join(self.parts).rstrip()
        self.parts.clear()
        if self.level >= logging.ERROR and line:
            _recent_errors.append(line)
        if line:
            logger.log(self.level, "%s", line)


@functools.cache
def llama() -> Any:  # noqa: ANN401 - the ctypes module is untyped by nature
    """Return the `llama_cpp` module, loaded, with backends initialised and the log routed."""
    import llama_cpp.llama_cpp as native

    callback = native.llama_log_callback(_LogRouter())
    _keep_alive.append(callback)
    native.llama_log_set(callback, ctypes.c_void_p(0))
    native.llama_backend_init()
    return native


@functools.cache
def native_function(name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    """Return a libllama or ggml function with its own prototype.

    A wheel holds several copies of each shared object, and opening another file would map a second
    ggml with its own buffer types: every symbol comes from the handle llama_cpp opened.
    Subscripting that handle makes a new function object, so the prototypes of llama_cpp's own
    functions stay as they are.
    """
    function = llama()._lib[name]
    function.restype = result
    function.argtypes = list(arguments)
    return function


def exported_function(names: Sequence[str], result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    """Return `native_function` of the first of these names that the library has.

    For functions that llama.cpp has not declared stable: they go by the names that C++ compilers
    give them. Raises UnsupportedModelError where there is none.
    """
    for name in names:
        try:
            return native_function(name, result, *arguments)
        except AttributeError:
            continue
    problem = f"this build of llama.cpp does not export {names[0]}"
    raise UnsupportedModelError(f"{problem}: install the llama-cpp-python that specrun asks for")


def last_native_errors() -> str:
    """Return llama.cpp's recent error lines as one sentence, and forget them."""
    text = "; ".join(dict.fromkeys(_recent_errors))
    _recent_errors.clear()
    return text


def engine_versions() -> dict[str, str]:
    """Return the versions of llama-cpp-python, llama.cpp and ggml, and llama.cpp's commit."""
    import importlib.metadata

    versions = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
    versions["llama.cpp"] = llama().llama_version().decode()
    for name, symbol in (("ggml", "ggml_version"), ("llama.cpp commit", "ggml_commit")):
        try:
            text: bytes | None = native_function(symbol, ctypes.c_char_p)()
        except AttributeError:
            continue
        versions[name] = (text or b"unknown").decode()
    return versions
