"""Public names that are written in C: builtins and extension modules, read from the running interpreter."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator
from types import BuiltinFunctionType, ModuleType
from typing import Final

NATIVE_MODULES: Final = (
    "array", "asyncio", "atexit", "audioop", "binascii", "builtins", "bz2", "cmath", "codecs",
    "collections", "contextlib", "contextvars", "copyreg", "crypt", "csv", "ctypes", "datetime",
    "decimal", "errno", "faulthandler", "fcntl", "functools", "gc", "grp", "hashlib", "hmac", "imp",
    "io", "itertools", "json", "locale", "lzma", "marshal", "math", "mmap", "operator", "os", "pickle",
    "pwd", "pyexpat", "queue", "random", "re", "readline", "resource", "select", "signal", "socket",
    "sqlite3", "ssl", "statistics", "string", "struct", "sys", "syslog", "termios", "threading", "time",
    "tracemalloc", "types", "unicodedata", "uuid", "warnings", "weakref", "xml.etree.ElementTree",
    "zlib", "zoneinfo",
)  # fmt: skip
"""Modules whose C parts are read; importing them has no side effect worth naming."""

NativeName = tuple[str, str, str | None, str | None]
_METHOD_TYPES = (type(str.join), type(dict.__dict__["fromkeys"]), staticmethod, classmethod)


def native_entries() -> Iterator[NativeName]:
    """(name, kind, signature, docstring) of every public C function, class and method, in a fixed order."""
    for module_name in NATIVE_MODULES:
        try:
            with warnings.catch_warnings():  # some are deprecated: still documented, still asked for
                warnings.simplefilter("ignore", DeprecationWarning)
                module = importlib.import_module(module_name)
        except ImportError:  # an interpreter built without this extension
            continue
        prefix = "" if module_name == "builtins" else f"{module_name}."
        if prefix:
            yield module_name, "module", None, module.__doc__
        for name in sorted(vars(module)):
            value = vars(module)[name]
            if not name.startswith("_") and _is_native(value, module):
                own_name = value.__name__ if isinstance(value, type) else name  # socket.SocketType is socket.socket
                yield from _object_names(prefix + own_name, value)


def _is_native(value: object, module: ModuleType) -> bool:
    """Whether a module's attribute is a C function or class that belongs to it, not one it imported."""
    if not isinstance(value, BuiltinFunctionType | type):
        return False
    if isinstance(value, type) and any(inspect.isfunction(member) for member in vars(value).values()):
        return False  # written in Python: the .py files have it
    if module.__name__ == "builtins":
        return True
    bound_to = getattr(value, "__self__", None)  # random.random is a method of a hidden instance
    owner = getattr(value, "__module__", None) or type(bound_to).__module__
    return owner.lstrip("_") in {module.__name__, "posix" if module.__name__ == "os" else module.__name__}


def _object_names(name: str, value: object) -> Iterator[NativeName]:
    if not isinstance(value, type):
        yield name, "function", _signature(name, value), getattr(value, "__doc__", None)
        return
    yield name, "class", None, value.__doc__
    for member_name in sorted(vars(value)):
        member = vars(value)[member_name]
        if not member_name.startswith("_") and isinstance(member, _METHOD_TYPES):
            full = f"{name}.{member_name}"
            yield full, "method", _signature(full, member), getattr(member, "__doc__", None)


def _signature(name: str, value: object) -> str | None:
    try:
        text = name.rsplit(".", 1)[-1] + str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return text if len(text) <= 120 and " at 0x" not in text else None
