"""llama.cpp's log: silent unless the application configures logging, then whole lines at the right
level."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from specrun.bindings.library import _LogRouter, last_native_errors

LOAD = """
import sys
from specrun.bindings.context import Context, ContextOptions
from specrun.bindings.model import Model
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
