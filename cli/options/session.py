"""--session: the cache of a long prompt, taken up from a file and kept in it for the next run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.bindings.files import check_target, require_writable
from specrun.cli.options.group import EVALUATION
from specrun.cli.options.types import NEW_FILE
from specrun.cli.terminal.table import bytes_text
from specrun.cli.terminal.terminal import Terminal
from specrun.runtime import Runtime

session_option = EVALUATION.option(
    "--session FILE",
    "Take up the cache that FILE holds, if there is one, and keep it there at the end: a prompt "
    "is evaluated once. Refused for another model or other settings.",
    NEW_FILE,
)


@contextmanager
def kept_session(
    opened: Callable[[], Runtime], path: Path | None, terminal: Terminal
) -> Iterator[None]:
    """Take up the cache of a file, and keep what is cached at the end of the block.

    `opened` returns what is open; where that is another model in the end, the file stays as it was.
    """
    if path is None:
        yield
        return
    path, runtime = path.expanduser(), opened()
    model = runtime.model.path
    check_target(path, force=True)
    require_writable(path)
    if path.exists():
        n_tokens = runtime.load_session(path)
        if n_tokens:
            terminal.note(f"{path}: {n_tokens:,} tokens of an earlier run are cached")
        else:
            why = f"{runtime.drafter} reads the target's states of the whole prompt"
            terminal.note(f"{path} is not taken up: {why}")
    yield
    runtime = opened()
    if runtime.model.path != model:
        terminal.note(f"{path} stays as it was: it is another model's now that answers")
        return
    n_tokens = runtime.save_session(path)
    terminal.note(f"{path}: {n_tokens:,} tokens kept, {bytes_text(path.stat().st_size)}")
