"""Terminal output, errors of commands, and files that users name.

Answers go to stdout, everything else to stderr, coloured if that helps. Model output and file
metadata may carry terminal control codes, which are taken out.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TextIO

import click

from specrun.bindings.errors import FileMissingError, ModelError, SpecrunError

# == The two streams ===============================================================================


# C0 and DEL and C1: escape sequences need one of them to begin. Line breaks and tabs are text.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Return the text without control characters other than line breaks and tabs."""
    return text.translate(_CONTROLS)


def one_line(text: str, limit: int = 200) -> str:
    """Return the text as one line without control characters, cut to `limit` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


_NARROWEST = 20


def _columns() -> int:
    """Return how many characters a line of notes has: one less than the screen's width."""
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = 0
    return max(_NARROWEST, (width or shutil.get_terminal_size().columns) - 1)


def wrapped(text: str) -> str:
    """Return the text with its lines broken at words; the rest of a line keeps its indentation."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        short = textwrap.wrap(
            line,
            _columns(),
            subsequent_indent=indent,
            break_on_hyphens=False,
            drop_whitespace=True,
            replace_whitespace=False,
        )
        lines += short or [""]
    return "\n".join(lines)


ColorChoice = Literal["on", "off", "auto"]
Style = Literal["plain", "dim", "bold", "cyan", "green", "yellow", "red"]
_CODES: dict[Style, str] = {
    "plain": "",
    "bold": "\x1b[1m",
    "dim": "\x1b[2m",
    "red": "\x1b[31m",
    "green": "\x1b[32m",
    "yellow": "\x1b[33m",
    "cyan": "\x1b[36m",
}
_RESET = "\x1b[0m"


class Terminal:
    """The two output streams of a command.

    `color` "auto" colours terminals only, unless NO_COLOR or FORCE_COLOR is set. `quiet`
    leaves out notes (banner, statistics), never answers, warnings or errors. `as_json` is for the
    command: it prints its result as JSON.
    """

    def __init__(
        self,
        color: ColorChoice = "auto",
        *,
        quiet: bool = False,
        verbosity: int = 0,
        as_json: bool = False,
    ) -> None:
        self.quiet = quiet
        self.verbosity = verbosity
        self.as_json = as_json
        self.answers_on_screen = sys.stdout.isatty()
        self.notes_on_screen = sys.stderr.isatty()
        self.color_answers = _wants_color(color, self.answers_on_screen)
        self.color_notes = _wants_color(color, self.notes_on_screen)

    # -- stdout ------------------------------------------------------------------------------------

    def answer(self, text: str, style: Style = "plain") -> None:
        """Write model text or JSON to stdout at once: raw into a pipe, harmless on a screen."""
        if self.answers_on_screen:
            text = printable(text)
        if text:
            _write(sys.stdout, self._styled(text, style, self.color_answers))

    def answer_line(self, text: str) -> None:
        """Write a sentence to stdout; a screen gets it wrapped at words."""
        self.answer((wrapped(text) if self.answers_on_screen else text) + "\n")

    def answer_json(self, value: object, **form: Any) -> None:  # noqa: ANN401 - of `json.dumps`
        """Write a value as JSON to stdout."""
        self.answer(json.dumps(value, **form) + "\n")

    def answer_drawn(self, text: str) -> None:
        """Write text with escape sequences of our own to stdout; a model's text has none left."""
        if text:
            _write(sys.stdout, text)

    # -- stderr ------------------------------------------------------------------------------------

    def say(self, text: str, style: Style = "plain") -> None:
        """Write a line to stderr, also with `quiet`; a screen gets it wrapped at words."""
        text = wrapped(printable(text)) if self.notes_on_screen else printable(text)
        _write(sys.stderr, self._styled(text, style, self.color_notes) + "\n")

    def note(self, text: str, style: Style = "dim") -> None:
        """Write a line to stderr that `quiet` leaves out."""
        if not self.quiet:
            self.say(text, style)

    def warn(self, text: str) -> None:
        """Write a warning to stderr."""
        self.say(f"Warning: {text}", "yellow")

    def error(self, text: str) -> None:
        """Write an error to stderr, after which the command goes on."""
        self.say(f"Error: {text}", "red")

    def passing(self, text: str) -> None:
        """Show a line that the next passing line replaces; "" takes it away. Screens only."""
        if self.notes_on_screen and not self.quiet:
            text = one_line(text, _columns())  # a longer one could not be replaced
            _write(sys.stderr, "\r\x1b[K" + self._styled(text, "dim", self.color_notes))

    @contextmanager
    def meanwhile(self, text: str = "") -> Iterator[None]:
        """Show a passing line while the block runs, which may replace it; then take it away."""
        if text:
            self.passing(text)
        try:
            yield
        finally:
            self.passing("")

    def passing_end(self, name: str, text: str) -> None:
        """Show a name and the end of a text, as much as fits a passing line."""
        line = one_line(text, len(text) + 1)
        room = max(0, _columns() - len(name))
        self.passing(name + (line if len(line) <= room else f"…{line[len(line) - room + 1 :]}"))

    def _styled(self, text: str, style: Style, color: bool) -> str:
        return f"{_CODES[style]}{text}{_RESET}" if color and _CODES[style] else text


def _wants_color(color: ColorChoice, on_screen: bool) -> bool:
    if color != "auto":
        return color == "on"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return on_screen and os.environ.get("TERM") != "dumb"


def _write(stream: TextIO, text: str) -> None:
    if stream is sys.stderr:
        sys.stdout.flush()  # so that both appear in the order they were written
    stream.write(text)
    stream.flush()


# == Errors: each becomes a sentence on stderr and an exit code ====================================
#
# 0 ok, 1 failure, 2 usage, 3 bad model or file, 4 pair that does not fit, 5 out of memory or a
# prompt larger than the context, 130 interrupted. A closed stdout (`| head`) ends quietly with 0.


INTERRUPTED = 130
_VERBOSITY_KEY = "specrun.verbosity"


class ReportedError(click.ClickException):
    """An error as the user sees it, without control characters that a quoted file may hold."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code  # type: ignore[misc]  # click's default is one for the class

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it to stderr, wrapped at words on a screen."""
        text = f"Error: {self.format_message()}"
        click.echo(wrapped(text) if sys.stderr.isatty() else text, file=file, err=file is None)


class WrongUsage(click.UsageError):
    """Options or arguments that make no sense, in a sentence wrapped at words on a screen."""

    def format_message(self) -> str:
        """Return the sentence; click writes "Error: " before it."""
        text = printable(self.message)
        return wrapped(f"Error: {text}").removeprefix("Error: ") if sys.stderr.isatty() else text


def set_verbosity(verbosity: int) -> None:
    """Remember for the running command whether unexpected errors show a traceback (from 2 on)."""
    click.get_current_context().meta[_VERBOSITY_KEY] = verbosity


@contextmanager
def reported_errors(context: click.Context) -> Iterator[None]:
    """Turn every exception of the block into one that click prints with the right exit code."""
    try:
        yield
    except click.UsageError as error:
        raise WrongUsage(error.format_message(), error.ctx) from error
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
        raise ReportedError(noted(message, error), 5) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        message = f"{error.filename}: {reason}" if error.filename else reason
        raise ReportedError(noted(message, error), 1) from error
    except Exception as error:
        hint = "this is a mistake in specrun"
        if context.meta.get(_VERBOSITY_KEY, 0) >= 2:
            traceback.print_exc()
        else:
            hint += "; run with -vv for the traceback"
        message = f"{type(error).__name__}: {error} ({hint})"
        raise ReportedError(noted(message, error), 1) from error


def noted(message: str, error: BaseException) -> str:
    """Return the message and the error's notes (`add_note`), a line each."""
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


# == Paths that users type: their errors, and near names ===========================================


MAX_TEXT_BYTES = 64 * 1024 * 1024


def require_file(path: Path) -> Path:
    """Return `path` if it is there; raises FileMissingError with near names of its folder."""
    if path.is_dir():
        raise FileMissingError(f"{_shown(path)} is a folder{_files_in(path)}")
    if path.exists():
        return path
    if not path.parent.is_dir():
        raise FileMissingError(
            f"there is no folder {_shown(path.parent)} to hold {one_line(path.name)}"
        )
    near = difflib.get_close_matches(path.name, _names(path.parent), 3, cutoff=0.5)
    advice = _files_in(path.parent)
    if near:
        advice = f". Did you mean {' or '.join(_shown(path.parent / name) for name in near)}?"
    raise FileMissingError(f"there is no file {_shown(path)}{advice}")


def read_text(path: Path) -> str:
    """Return the text of a prompt or template file."""
    require_file(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise FileMissingError(
            f"{_shown(path)} cannot be read ({error.strerror}); check its permissions"
        ) from error
    return decode_text(data, _shown(path))


def decode_text(data: bytes, source: str) -> str:
    """Return UTF-8 bytes as text; raises ModelError naming `source` for others, or too many."""
    if len(data) > MAX_TEXT_BYTES:
        raise ModelError(
            f"{source} holds more than {MAX_TEXT_BYTES // 2**20} MiB of text, more than any context"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{source} is not UTF-8 text (byte {error.start + 1}); convert it first"
        ) from error


def _files_in(folder: Path) -> str:
    models = [name for name in _names(folder) if name.endswith(".gguf")]
    if not models:
        return "; name a file"
    more = f" and {len(models) - 3} more" if len(models) > 3 else ""
    return f"; the GGUF files there are {', '.join(map(one_line, models[:3]))}{more}"


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError:
        return []


def _shown(path: Path) -> str:
    return one_line(str(path), 4096)
