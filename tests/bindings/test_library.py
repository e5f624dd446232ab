"""llama.cpp's log: silent unless the application configures logging, then whole lines at the right
level. Its C++ functions, by the names that compilers give them. And native handles, which are freed
by the last that refers to them."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import F32

from specrun.bindings import library
from specrun.bindings.contexts import Batch, Context, ContextOptions
from specrun.bindings.errors import ClosedError
from specrun.bindings.library import (
    NativeHandle,
    _LogRouter,
    cpp_names,
    exported_function,
    has_function,
    last_native_errors,
    llama,
    native_function,
    own_cpp_library,
)
from specrun.bindings.models import Model

LOAD = """
import sys
from specrun.bindings.contexts.context import Context, ContextOptions
from specrun.bindings.models.model import Model
with Model(sys.argv[1]) as model, Context(model, ContextOptions(n_ctx=256, n_threads=1)):
    pass
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_loading_is_silent_by_default(tiny_model):
    done = run(LOAD, str(tiny_model))
    assert done.stdout == ""
    assert done.stderr == ""


def test_a_refused_file_is_silent_too(tiny_model, tmp_path):
    path = tmp_path / "refused.gguf"
    path.write_bytes(tiny_model.read_bytes().replace(b"llama.block_count", b"llama.block_cpunt"))
    code = LOAD.replace(
        "with Model", "try:\n  Model(sys.argv[1])\nexcept Exception: sys.exit(0)\nwith Model"
    )
    done = run(code, str(path))
    assert (done.stdout, done.stderr) == ("", "")


def test_the_log_goes_to_logging_when_configured(tiny_model):
    done = run("import logging; logging.basicConfig(level=logging.DEBUG)\n" + LOAD, str(tiny_model))
    assert done.stdout == ""
    assert "specrun.llama" in done.stderr
    assert "llama_model_loader" in done.stderr


@pytest.fixture
def router(caplog):
    caplog.set_level(logging.DEBUG, "specrun.llama")
    last_native_errors()
    yield _LogRouter()
    last_native_errors()


def test_parts_of_a_line_are_joined_under_its_first_level(router, caplog):
    router(3, b"one ", None)
    router(5, b"two ", None)
    assert not caplog.records
    router(5, b"three\n", None)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "one two three")
    ]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0, logging.DEBUG),
        (1, logging.DEBUG),
        (2, logging.INFO),
        (3, logging.WARNING),
        (4, logging.ERROR),
    ],
)
def test_levels_are_those_of_ggml_log_level(router, caplog, level, expected):
    router(level, b"line\n", None)
    assert [record.levelno for record in caplog.records] == [expected]


def test_errors_are_kept_for_messages_once(router):
    router(4, b"cannot open\n", None)
    router(3, b"a warning\n", None)
    router(4, b"cannot open\n", None)
    router(4, "caf\xe9 \udcff\n".encode("latin-1", "replace"), None)
    assert last_native_errors().startswith("cannot open; caf")
    assert last_native_errors() == ""


def test_a_log_line_is_not_a_format_string(router, caplog):
    router(1, b"100% %s %d\n", None)
    assert caplog.records[0].getMessage() == "100% %s %d"


def test_empty_lines_and_null_texts_are_left_out(router, caplog):
    router(1, b"\n", None)
    router(1, None, None)
    router(1, b"\n", None)
    assert not caplog.records


CONTEXT = "llama_context *"
# The third: llama.dll's exports, as others read them from shipped wheels; the last two by clang
# for x86_64-pc-windows-msvc.
EXPORTS = [
    (("llama_set_embeddings_nextn", "void", CONTEXT, "bool", "bool"), "XPEAUllama_context@@_N1"),
    (("llama_get_embeddings_nextn", "float *", CONTEXT), "PEAMPEAUllama_context@@"),
    (
        ("llama_get_embeddings_nextn_ith", "float *", CONTEXT, "int32_t"),
        "PEAMPEAUllama_context@@H",
    ),
    (
        ("llama_set_embeddings_layer_inp", "void", CONTEXT, "uint32_t", "bool"),
        "XPEAUllama_context@@I_N",
    ),
    (
        ("llama_get_embeddings_layer_inp", "float *", CONTEXT, "uint32_t"),
        "PEAMPEAUllama_context@@I",
    ),
    (("llama_set_nextn_layer_offset", "void", CONTEXT, "int32_t"), "XPEAUllama_context@@H"),
]


@pytest.mark.parametrize(("declaration", "types"), EXPORTS, ids=lambda value: value[0])
def test_names_of_compilers(declaration: tuple[str, ...], types: str):
    plain, unix, visual = cpp_names(*declaration)
    assert plain == declaration[0]
    assert visual == f"?{plain}@@YA{types}@Z"
    # Whatever compiler made this library: one of the names is its own.
    assert [name for name in (plain, unix, visual) if has_function(name)]
    assert exported_function((plain, unix, visual), None)


def test_ggml_may_lie_in_libraries_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """As on Windows, on which a handle shows its own functions only."""
    whole = library.llama()._lib
    first = type("Shown", (), {"__getitem__": lambda _, name: getattr(None, name)})()
    monkeypatch.setattr(library, "_libraries", lambda: [first, whole])
    native_function.cache_clear()
    assert native_function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)(0) == 4
    with pytest.raises(AttributeError, match="no function ggml_nonsense"):
        native_function("ggml_nonsense", None)
    native_function.cache_clear()


# -- handles ---------------------------------------------------------------------------------------


def test_a_handle_is_freed_once_by_the_last_that_refers_to_it() -> None:
    freed: list[int] = []
    handle = NativeHandle(40, freed.append)
    part = NativeHandle(41, None, handle)
    user = NativeHandle(42, freed.append, part)
    assert handle + 2 == user
    del handle, part
    assert freed == []
    del user
    assert freed == [42, 40]


def test_what_is_closed_while_it_is_used_is_freed_when_the_use_ends(tiny_model: Path) -> None:
    """A view of logits is a use; so is a call, which holds its arguments."""
    freed: list[str] = []

    def noting(name: str) -> Any:
        function = getattr(llama(), name)
        return lambda handle: (freed.append(name), function(handle))

    model = Model(tiny_model)
    model._handle._free = noting("llama_model_free")
    context = Context(model, ContextOptions(**F32))
    context._handle._free = noting("llama_free")
    batch = Batch(2, 1)
    batch.fill_chain([1, 2], 0, [0], 1)
    rows = context.decode(batch)
    row = rows.logits(0)
    kept = row.copy()
    context.close()
    model.close()
    assert freed == []
    np.testing.assert_array_equal(row, kept)
    with pytest.raises(ClosedError, match="the context is closed"):
        rows.logits(0)
    del row
    assert freed == ["llama_free", "llama_model_free"]


# -- a C++ library of llama.cpp's own --------------------------------------------------------------

STREAMS = """
#include <sstream>
extern "C" int length(int n) { std::ostringstream text; text << n; return text.str().size(); }
"""
BESIDE = """
import ctypes, sys
from pathlib import Path
from types import SimpleNamespace
import specrun.bindings.library as library
import llama_cpp.llama_cpp as native
ctypes.CDLL("libstdc++.so.6")
native._lib = ctypes.CDLL(sys.argv[1])
native.llama_log_set = native.llama_backend_init = lambda *_: None
library._has_gpu = lambda _: False
library.llama()
"""


def compiled(folder: Path, *options: str) -> Path:
    source, library = folder / "length.cpp", folder / "liblength.so"
    source.write_text(STREAMS)
    command = ["g++", "-shared", "-fPIC", *options, str(source), "-o", str(library)]
    if shutil.which("g++") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs g++, and both forms of its C++ library")
    return library


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux alone")
def test_a_copy_of_the_cpp_library_is_refused_unless_one_is_there_for_all(tmp_path: Path) -> None:
    own, environment = compiled(tmp_path, "-static-libstdc++"), {**os.environ, "LD_PRELOAD": ""}
    command = [sys.executable, "-c", BESIDE, str(own)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert f"ModelLoadError: {own} holds a C++ library of its own" in done.stderr
    assert "start with LD_PRELOAD=libstdc++.so.6" in done.stderr
    environment["LD_PRELOAD"] = "libstdc++.so.6"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux alone")
def test_the_shared_cpp_library_is_no_copy(tmp_path: Path) -> None:
    assert own_cpp_library(ctypes.CDLL(str(compiled(tmp_path)))) is None
    assert own_cpp_library(llama()._lib) is None
