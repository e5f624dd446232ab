"""The log: silent by default, to stderr with -v, to a file with --log-file."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from specrun.bindings.errors import OptionError
from specrun.cli.printable import one_line

__all__ = ["start_logging"]

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _SafeFormatter(logging.Formatter):
    """Logged metadata comes from model files: no control codes may reach the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record), 2000)


def start_logging(verbosity: int, log_file: Path | None) -> Callable[[], None]:
    """Log as -v and --log-file ask; return what ends it.

    -v shows specrun's own messages and llama.cpp's warnings, -vv everything. The file gets at least all
    messages of level INFO.
    """
    root = logging.getLogger("specrun")
    handlers: list[logging.Handler] = []
    if verbosity:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[0].setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)
        if verbosity == 1:
            handlers[0].addFilter(_without_native_chatter)
    if log_file is not None:
        handlers.append(_file_handler(log_file))
    for handler in handlers:
        handler.setFormatter(_SafeFormatter(_FORMAT))
        root.addHandler(handler)
    level_before = root.level
    if handlers:
        root.setLevel(logging.DEBUG if verbosity > 1 else logging.INFO)

    def stop() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level_before)

    return stop


def _without_native_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or not record.name.startswith("specrun.llama")


def _file_handler(path: Path) -> logging.Handler:
    try:
        return logging.FileHandler(path.expanduser(), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OptionError(f"the log file {path} cannot be written ({error.strerror}); choose another") from error
