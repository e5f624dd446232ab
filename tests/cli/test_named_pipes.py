"""Named pipes where files are asked for: an error at once, where opening them would wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.bindings.errors import OptionError, SpecrunError
from specrun.bindings.gguf import read_header
from specrun.convert.checkpoint.checkpoint import read_safetensors
from specrun.convert.checkpoint.json_file import read_small_file
from specrun.convert.quantize.imatrix_file import read_importance
from specrun.runtime import Runtime
from specrun.runtime.drafters.combinators import read_choice_logs
from specrun.runtime.drafters.retrieval import read_store_header
from specrun.runtime.drafters.retrieval.datastore import check_text_file
from specrun.runtime.engine.session_file import file_digest

from .conftest import Models, Run

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
SECONDS = 20.0


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def within_time(work: Callable[[], Any]) -> Any:
    """What the work returns or raises; it fails where that does not come."""
    came: list[Any] = []

    def run() -> None:
        try:
            came.append(work())
        except Exception as error:
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert came, "it waits for the other end of the pipe"
    return came[0]


@pytest.mark.parametrize(
    "read",
    [
        read_header,
        file_digest,
        read_store_header,
        check_text_file,
        read_safetensors,
        lambda path: read_small_file(path, "such a file"),
        read_importance,
        read_choice_logs,
    ],
)
def test_a_named_pipe_is_refused_at_once(pipe: Path, read: Callable[[Path], Any]) -> None:
    error = within_time(lambda: read(pipe))
    assert isinstance(error, SpecrunError)
    assert "pipe is not a regular file" in str(error)


def test_a_session_is_neither_read_from_one_nor_kept_in_one(models: Models, pipe: Path) -> None:
    with Runtime(models.target, "none", n_threads=1) as runtime:
        runtime.generate("a", max_tokens=1)
        assert isinstance(within_time(lambda: runtime.load_session(pipe)), SpecrunError)
        assert isinstance(within_time(lambda: runtime.save_session(pipe)), OptionError)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "options",
    [
        ("-m", "PIPE"),
        ("-m", "MODEL", "--session", "PIPE"),
        ("-m", "MODEL", "--reference", "PIPE"),
        ("-m", "MODEL", "-md", "PIPE"),
        ("-m", "MODEL", "--drafter", "rest(PIPE)"),
        ("-m", "MODEL", "--lora", "PIPE"),
    ],
    ids=" ".join,
)
def test_options_refuse_one(run: Run, models: Models, pipe: Path, options: tuple[str, ...]) -> None:
    named = [
        text.replace("PIPE", str(pipe)).replace("MODEL", str(models.target)) for text in options
    ]
    done = within_time(lambda: run("generate", "-p", "a", "-n", 1, *named))
    assert done.exit_code in (2, 3), done.output
    assert "not a regular file" in done.stderr
