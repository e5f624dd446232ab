"""Options of output: colour, logging, statistics; and the log itself.

The log is silent by default, goes to stderr with -v, and to a file with --log-file.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from specrun.bindings.errors import OptionError
from specrun.bindings.files import logger as kept_files
from specrun.cli.options.group import OUTPUT, Decorator, option_group
from specrun.cli.options.types import NEW_FILE
from specrun.cli.terminal.terminal import ColorChoice, Terminal, one_line, set_verbosity
from specrun.runtime.grammar.schema import logger as grammars

_JSON = "specrun.json"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _SafeFormatter(logging.Formatter):
    """Logged metadata comes from model files: no control codes may reach the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record), 2000)


class _LogFile(logging.FileHandler):
    """Appends to a file; messages that cannot be written are lost, with one warning."""

    _has_warned = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn of a full disk, and go on: the next message tries again."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        # Each write of the stream's buffer would fail again.
        stream, self.stream = self.stream, None
        with suppress(OSError):
            if stream is not None:
                stream.close()
        if not self._has_warned:
            self._has_warned = True
            problem = f"the log file {self.baseFilename} cannot be written ({error.strerror})"
            with suppress(OSError):
                click.echo(f"Warning: {problem}: messages are missing there", err=True)

    def close(self) -> None:
        """Close the file, if that is still possible."""
        with suppress(OSError):
            super().close()


class _ShownWarnings(logging.Handler):
    """Shows warnings about files that specrun keeps for itself, and schemas, also without -v."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning."""
        self._terminal.warn(one_line(record.getMessage(), 2000))


def start_logging(verbosity: int, log_file: Path | None) -> Callable[[], None]:
    """Start the log of -v and --log-file; return the function that ends it.

    -v shows specrun's own messages and llama.cpp's warnings, -vv everything. The file gets at least
    all messages of level INFO.
    """
    root = logging.getLogger("specrun")
    level_before = root.level
    level = logging.DEBUG if verbosity > 1 else logging.INFO
    handlers: list[logging.Handler] = []
    if verbosity:
        handlers.append(logging.StreamHandler(sys.stderr))
        handlers[0].setLevel(level)
        if verbosity == 1:
            handlers[0].addFilter(_without_native_chatter)
    if log_file is not None:
        path = log_file.expanduser()
        try:
            handlers.append(_LogFile(path, encoding="utf-8", errors="backslashreplace"))
        except OSError as error:
            raise OptionError(
                f"the log file {log_file} cannot be written ({error.strerror}); choose another"
            ) from error
    for handler in handlers:
        handler.setFormatter(_SafeFormatter(_FORMAT))
        root.addHandler(handler)
    if handlers:
        root.setLevel(level)

    def stop() -> None:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level_before)

    return stop


def _without_native_chatter(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or not record.name.startswith("specrun.llama")


@dataclass(frozen=True, slots=True)
class AnswerDisplay:
    """The parts of an answer that are shown in addition to its text."""

    show_timings: bool = OUTPUT.setting(
        "--show-timings/--no-show-timings",
        "Print a line of statistics after each answer. Its tok/s leaves out the time of the "
        "prompt.",
        default=True,
    )
    show_draft: bool = OUTPUT.setting(
        "--show-draft", "Show accepted drafted tokens in cyan (with colours).", is_flag=True
    )
    show_thinking: bool = OUTPUT.setting(
        "--show-thinking/--fold-thinking",
        "Show a model's thinking on the screen, or fold it to one line.",
        default=False,
    )


answer_display_options = option_group("display", AnswerDisplay)


def _open_terminal(
    color: ColorChoice, verbose: int, quiet: bool, log_file: Path | None
) -> Terminal:
    set_verbosity(verbose)
    context = click.get_current_context()
    context.call_on_close(start_logging(verbose, log_file))
    as_json = bool(context.meta.get(_JSON))
    terminal = Terminal(color, quiet=quiet, verbosity=verbose, as_json=as_json)
    if not verbose:  # with it they are in the log
        handler = _ShownWarnings(terminal)
        for logger in (kept_files, grammars):
            logger.addHandler(handler)
            context.call_on_close(functools.partial(logger.removeHandler, handler))
    return terminal


terminal_options = option_group(
    "terminal",
    _open_terminal,
    OUTPUT.option(
        "-co, --color",
        "Use colours. auto: on terminals, unless NO_COLOR or FORCE_COLOR is set.",
        click.Choice(["on", "off", "auto"]),
        default="auto",
    ),
    OUTPUT.option(
        "-v, --verbose", "Log to stderr; -vv logs llama.cpp too, and shows tracebacks.", count=True
    ),
    OUTPUT.flag("-q, --quiet", "Print only answers, warnings and errors."),
    OUTPUT.option("--log-file FILE", "Append the log, llama.cpp's too, to a file.", NEW_FILE),
)


def json_option(help: str = "Print one JSON object.") -> Decorator:
    """Return --json, of which the command's terminal knows."""

    def remember(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
        context.meta[_JSON] = wanted

    return OUTPUT.flag("--json", help, dest="as_json", expose_value=False, callback=remember)


def plot_option(drawn: str) -> Decorator:
    """Return --plot, the file for a picture of `drawn`."""
    return OUTPUT.option("--plot FILE", f"Draw {drawn}: a .png, .svg or .pdf.", NEW_FILE)


def check_plot(plot: Path | None) -> None:
    """Raise the errors of drawing to this file before the work begins."""
    if plot is not None:
        from specrun.bench.plots import check_plot_file

        check_plot_file(plot)


markdown_option = OUTPUT.option(
    "--markdown/--no-markdown",
    "Draw answers as Markdown on a terminal with colours; not with --show-draft.",
    default=True,
)
