"""The native library: loaded on first use, initialised once, its log routed to Python's logging."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrun.bindings.errors import ModelLoadError, UnsupportedModelError
from specrun.bindings.threads import FORK, patient_threads

logger = logging.getLogger("specrun.llama")
# Without a handler somewhere, Python's last-resort handler would write llama.cpp's warnings to
# stderr: the library is silent unless the application configures logging.
logging.getLogger("specrun").addHandler(logging.NullHandler())

# ggml_log_level -> logging level; 5 continues the previous line.
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
_recent_errors: deque[str] = deque(maxlen=8)
_keep_alive: list[object] = []  # llama.cpp keeps the callback's pointer for the life of the process


class NativeHandle(int):
    """A native pointer, which `free` is called with when nothing refers to it any more.

    A caller refers to it during a call, and so does an array over its memory: nothing is
    freed under a call, whether the owner is closed in another thread or in a signal's handler.
    `keeps` are the objects that it needs itself, and are freed after it.

    In a forked process nothing is freed: the memory belongs to threads or to a GPU of the
    parent, so that freeing may wait for them or end the process. The system takes the memory back.
    """

    _free: Callable[[int], None] | None = None
    _keeps: tuple[object, ...] = ()

    def __new__(
        cls, pointer: int, free: Callable[[int], None] | None = None, *keeps: object
    ) -> NativeHandle:
        """Take over a pointer; without `free` it is a part of the object that it keeps."""
        handle = super().__new__(cls, pointer)
        handle._free, handle._keeps = free, keeps
        return handle

    def __del__(self) -> None:
        if self._free is not None and not FORK.lost:
            self._free(int(self))


class _LogRouter:
    """Joins llama.cpp's partial lines and hands whole ones to logging."""

    def __init__(self) -> None:
        self.is_muted = False
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
        if line and not self.is_muted:
            logger.log(self.level, "%s", line)


_router = _LogRouter()


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep llama.cpp's lines out of the log: for models that are only counted, not opened for use.

    Its errors are still those of `last_native_errors`.
    """
    before, _router.is_muted = _router.is_muted, True
    try:
        yield
    finally:
        _router.is_muted = before


@functools.cache
def llama() -> Any:  # noqa: ANN401 - the ctypes module is untyped by nature
    """Return the `llama_cpp` module, loaded, with backends initialised and the log routed."""
    is_beside_another = _has_cpp_library()
    with patient_threads():
        import llama_cpp.llama_cpp as native

    copy = own_cpp_library(native._lib) if is_beside_another else None
    if copy is not None:
        problem = f"{copy} holds a C++ library of its own, which does not work beside the system's"
        advice = "start with LD_PRELOAD=libstdc++.so.6, or build llama.cpp with a compiler that has"
        raise ModelLoadError(f"{problem}: {advice} libstdc++.so")
    callback = native.llama_log_callback(_router)
    _keep_alive.append(callback)
    native.llama_log_set(callback, ctypes.c_void_p(0))
    native.llama_backend_init()
    if _has_gpu(native._lib):
        FORK.note_work()  # a GPU's driver is started by looking for the GPU
    return native


# -- the C++ library -------------------------------------------------------------------------------

_OF_CPP = "_ZNSolsEi"  # std::ostream & operator<<(int), of GNU's C++ library


class _Place(ctypes.Structure):
    """Dl_info: the place of an address."""

    _fields_ = (
        *(("file", ctypes.c_char_p), ("base", ctypes.c_void_p)),
        *(("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)),
    )


def _has_cpp_library() -> bool:
    """Return whether GNU's C++ library is loaded, as it is with numpy; found on Linux alone."""
    try:
        return b"/libstdc++.so" in Path("/proc/self/maps").read_bytes()
    except OSError:
        return False


def own_cpp_library(library: ctypes.CDLL) -> Path | None:
    """Return the file of these libraries that holds, and uses, a copy of the C++ library, if any.

    A compiler that has libstdc++.a and no libstdc++.so puts one into llama.cpp's libraries. With
    two of them, a stream of one gets functions of the other as soon as a model is opened, and the
    process ends (seen with CUDA). If the other is for all (LD_PRELOAD), all use that.
    """
    everywhere = ctypes.CDLL(None)
    if hasattr(everywhere, _OF_CPP) or not hasattr(library, _OF_CPP):
        return None
    place = _Place()
    everywhere.dladdr(ctypes.cast(library[_OF_CPP], ctypes.c_void_p), ctypes.byref(place))
    file = Path(os.fsdecode(place.file or b"libstdc++"))
    return None if file.name.startswith("libstdc++") else file


def _has_gpu(library: Any) -> bool:  # noqa: ANN401 - a ctypes library
    """Return whether a backend found a GPU; support in llama.cpp is no sign of one (RPC)."""
    try:
        find = library["ggml_backend_dev_by_type"]
    except AttributeError:  # ggml's libraries are apart on Windows
        return bool(library.llama_supports_gpu_offload())
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int]
    return any(find(kind) for kind in (1, 2))  # GGML_BACKEND_DEVICE_TYPE_GPU, _IGPU


@functools.cache
def native_function(name: str, result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    """Return a libllama or ggml function with its own prototype.

    A wheel holds several copies of each shared object, and opening another file would map a second
    ggml with its own buffer types: every symbol comes from the handle llama_cpp opened.
    Subscripting that handle makes a new function object, so the prototypes of llama_cpp's own
    functions stay as they are.
    """
    for library in _libraries():
        try:
            function = library[name]
        except AttributeError:
            continue
        function.restype = result
        function.argtypes = list(arguments)
        return function
    raise AttributeError(f"llama.cpp has no function {name}")


@functools.cache
def _libraries() -> list[Any]:
    """Return llama_cpp's handle, which sees ggml's libraries on Unix, and on Windows those, too."""
    handles = [llama()._lib]
    if sys.platform == "win32":
        # Each has its own names there. Opening a loaded path returns the loaded library.
        files = Path(handles[0]._name).parent.glob("ggml*.dll")
        handles += [ctypes.CDLL(str(file)) for file in files]
    return handles


def has_function(name: str) -> bool:
    """Return whether the library, or one that it needs, has a function of this name."""
    return any(hasattr(library, name) for library in _libraries())


def exported_function(names: Sequence[str], result: Any, *arguments: Any) -> Any:  # noqa: ANN401 - ctypes types
    """Return `native_function` of the first of these names that the library has.

    For functions that llama.cpp has not declared stable: they go by the names that C++ compilers
    give them. Raises UnsupportedModelError if there is none.
    """
    for name in names:
        try:
            return native_function(name, result, *arguments)
        except AttributeError:
            continue
    problem = f"this build of llama.cpp does not export {names[0]}"
    raise UnsupportedModelError(f"{problem}: install the llama-cpp-python that specrun requires")


# A type of C++ as gcc and clang write it in names (Itanium's ABI), and as Visual C++ does, for
# pointers of 64 bits.
_TYPES = {
    "void": ("v", "X"),
    "bool": ("b", "_N"),
    "int32_t": ("i", "H"),
    "uint32_t": ("j", "I"),
    "float *": ("Pf", "PEAM"),
    "llama_context *": ("P13llama_context", "PEAUllama_context@@"),
}


def cpp_names(name: str, result: str, *arguments: str) -> tuple[str, str, str]:
    """Return a function's names: plain, by gcc and clang, by Visual C++; no struct comes twice.

    The second has only arguments: `_Z`, the name with its length, their types. The third has
    all: `?name@@`, Y for a function outside of classes, A for C's calling convention, the types of
    result and arguments, `@Z`. An argument's type of more than a letter that comes again is written
    as its number among the types of that kind.
    """
    plain = "".join(_TYPES[argument][0] for argument in arguments)
    known: list[str] = []
    codes = ""
    for argument in arguments:
        code = _TYPES[argument][1]
        codes += str(known.index(code)) if code in known else code
        if len(code) > 1 and code not in known:
            known.append(code)
    visual = f"?{name}@@YA{_TYPES[result][1]}{codes}@Z"
    return name, f"_Z{len(name)}{name}{plain}", visual


def address_of(name: str) -> int:
    """Return the address of a function of llama.cpp or ggml."""
    pointer = ctypes.c_void_p
    return ctypes.cast(native_function(name, pointer), pointer).value or 0


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
