"""Errors of all commands: each becomes a sentence on stderr and an exit code.

0 ok · 1 failure · 2 usage · 3 bad model or file · 4 pair that does not fit · 5 out of memory, or a
prompt larger than the context · 130 interrupted. A closed stdout (`| head`) ends quietly with 0.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from specrun.bindings.errors import SpecrunError
from specrun.cli.terminal.terminal import printable

INTERRUPTED = 130
_OUT_OF_MEMORY = 5
_VERBOSITY_KEY = "specrun.verbosity"


class ReportedError(click.ClickException):
    """An error as the user sees it, without control characters that a quoted file may hold."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click's default is one for the class


def set_verbosity(verbosity: int) -> None:
    """Remember for the running command whether unexpected errors show a traceback (from 2 on)."""
    click.get_current_context().meta[_VERBOSITY_KEY] = verbosity


@contextmanager
def reported_errors(context: click.Context) -> Iterator[None]:
    """Turn every exception of the block into one that click prints with the right exit code."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except SpecrunError as error:
        raise ReportedError(noted(str(error), error), error.exit_code) from error
    except KeyboardInterrupt as error:
        raise ReportedError(noted("interrupted", error), INTERRUPTED) from error
    except BrokenPipeError as error:
        _forget_streams()
        raise click.exceptions.Exit(0) from error
    except MemoryError as error:
        message = "out of memory: use a smaller model or a smaller context (-c)"
        raise ReportedError(noted(message, error), _OUT_OF_MEMORY) from error
    except OSError as error:
        raise ReportedError(noted(_sentence(error), error), 1) from error
    except Exception as error:
        hint = "this is a mistake in specrun"
        if context.meta.get(_VERBOSITY_KEY, 0) >= 2:
            traceback.print_exc()
        else:
            hint += "; run with -vv for the traceback"
        message = f"{type(error).__name__}: {error} ({hint})"
        raise ReportedError(noted(message, error), 1) from error


def _sentence(error: OSError) -> str:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def noted(message: str, error: BaseException) -> str:
    """Return the message and, a line each, what was noted on the error on its way (`add_note`)."""
    return "\n".join([message, *getattr(error, "__notes__", ())])


def _forget_streams() -> None:
    """Point stdout and stderr at nothing: Python's flush at exit would complain of the pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nothing, stream.fileno())
    os.close(nothing)
